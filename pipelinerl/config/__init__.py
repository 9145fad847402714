"""Typed configuration: schema, cross-section rules, composition, load and save. No torch."""

from pipelinerl.config.load import load_config, save_config, to_dictconfig
from pipelinerl.config.run import RunConfig

__all__ = ["RunConfig", "load_config", "save_config", "to_dictconfig"]
