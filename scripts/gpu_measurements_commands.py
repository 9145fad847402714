"""Beginnings of the commands that the lists of measurements share. Pure."""

from __future__ import annotations

from gpu_measurements_plan import Until

#: Servers take long to start on a CPU, and nobody waits for its times.
REHEARSAL_LIMIT_S = 900
TESTS = (
    *("{python}", "-m", "pytest", "-v", "-p", "no:cacheprovider", "-rA", "--basetemp={work}/pytest"),
    "--junitxml={work}/tests.xml",
)
#: Runs that learn end when held-out success is 0.6 twice in succession.
LEARNED = Until("run/metrics.jsonl", "evaluation/test/success_rate", 0.6, times=2)


def guessing_run(device: str, *own: str) -> tuple[str, ...]:
    """`guessing_2gpu` with overrides of its own. The time ends it, not the number of steps. On `cpu` a dry run."""
    words = ("{python}", "-m", "pipelinerl.launch", "--config-name", "guessing_2gpu", "model_path={model}")
    words += ("output_dir={work}/run", "finetune.max_train_steps=600", *own)
    return (*words, "dry_run=true", "world.device=cpu") if device == "cpu" else words
