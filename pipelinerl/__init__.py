"""pipelinerl: asynchronous RL training of language models and agents with in-flight weight updates."""

__version__ = "0.1.0"
