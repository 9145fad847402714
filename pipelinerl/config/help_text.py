"""The text of `python -m pipelinerl.launch --help`. Called by the composition; reads only the names of files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipelinerl.config.paths import config_names

GROUPS = ("finetune", "rewards", "streams", "world")

_TEXT = """\
Train a language model by asynchronous reinforcement learning.

usage: python -m pipelinerl.launch [--config-name NAME] [--config-dir DIR] output_dir=DIR [key=value ...]

  output_dir=DIR       where the run writes everything (required)
  --config-name NAME   the experiment, or a configuration of yours (default: math, small sums that need no data set);
                       base has every key and no task: files of your own start from it
  --config-dir DIR     a folder of yours with NAME.yaml and your task's code; it may say `defaults: [base, _self_]`
  --cfg                print the resolved configuration and exit
  --help               print this text and exit

  key=value            set a key, for instance finetune.learning_rate=1e-5
  +key=value           add a key below a mapping with free keys;  ~key takes one away
  group=name           choose a file of a group, for instance streams=redis
  dry_run=true         print the plan (jobs, devices, ports, commands) and start nothing

configurations: {names}
{groups}

keys that most runs set:
  model_path                            Hugging Face name or folder of the model
  actor.rollout_policy                  dotted path of your generate_rollout
  dataset_loader                        dotted path of your load_problems
  train_dataset_names, test_dataset_names
  attempts                              rollouts per problem
  max_lag                               samples in flight beyond the batch being collected (0: on-policy)
  finetune.max_train_steps, finetune.learning_rate, finetune.gradient_accumulation_passes
  finetune.seq_length                   tokens of a packed micro-batch
  llm.parameters.max_tokens, llm.parameters.temperature
  vllm_config.vllm_kwargs.max_model_len
  world.actor_fraction, world.finetune_fraction, world.preprocessor_fraction
  wandb.mode                            online, offline or disabled
  tensorboard.enabled                   true: event files in output_dir/tensorboard

examples:
  python -m pipelinerl.launch output_dir=results/math
  python -m pipelinerl.launch --config-name quickstart output_dir=results/quickstart
  python -m pipelinerl.launch --config-name guessing output_dir=results/guessing
  python -m pipelinerl.launch --config-dir my_task --config-name my_task output_dir=results/my_task

every key: docs/configuration.md
"""


def help_text(search_dirs: Sequence[Path]) -> str:
    """Return the help, with the names of the configurations found in `search_dirs`."""
    names = sorted({name for folder in search_dirs for name in config_names(folder)})
    groups = [
        f"group {group}: "
        + ", ".join(sorted({name for folder in search_dirs for name in config_names(folder / group)}))
        for group in GROUPS
    ]
    return _TEXT.format(names=", ".join(names), groups="\n".join(groups))
