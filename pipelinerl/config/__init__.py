"""Typed configuration: schema, cross-section rules, composition, load and save. No torch."""

from pipelinerl.config.run import RunConfig

__all__ = ["RunConfig"]
