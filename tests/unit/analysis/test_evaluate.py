"""The command `eval`: which model, which task, which sampling, and what of a run's configuration it leaves out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelinerl.analysis.evaluate import _parser, evaluation_config
from pipelinerl.config import RunConfig
from pipelinerl.config.compose import compose
from pipelinerl.config.load import save_config
from pipelinerl.errors import ConfigError
from pipelinerl.rundir.layout import RunDir

EVAL = "[{name: hard, k: 4, temperature: 0}]"
ODD = {"text": '${x} "1e-3"'}


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run whose last model is exported."""
    words = ["finetune.lora.enabled=true", "finetune.keep_best=success_rate", "wandb.wandb_name=x", f"eval={EVAL}"]
    words += ["llm.parameters.temperature=0.7", "test_llm.parameters.max_tokens=5"]
    run = RunDir(tmp_path / "run")
    composed = compose(["--config-name", "quickstart", f"output_dir={run.root}", *words]).config
    assert composed is not None
    save_config(composed.model_copy(update={"custom": ODD}), run.config_file)
    export(run.current_model)
    return run


def export(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    return folder


def evaluated(folder: Path, *words: str) -> RunConfig:
    overrides = [word for word in words if "=" in word]
    args = _parser().parse_args([word for word in words if word not in overrides])
    folder.mkdir()
    composed = evaluation_config(args, overrides, folder)
    assert composed.config is not None
    return composed.config.of_stage()


def test_a_run_is_evaluated_on_its_own_sets_with_its_own_sampling(run: RunDir, tmp_path: Path) -> None:
    config = evaluated(tmp_path / "x", str(run.root))
    assert config.model_path == str(run.current_model) and config.output_dir == "results/run-evaluation"
    assert (config.debug.mode, config.test_dataset_names, config.plain_test_names) == ("evaluation", ["test"], ["test"])
    plain, hard = config.evaluation_parameters
    assert (plain.temperature, plain.max_tokens, hard.temperature, hard.max_tokens) == (0.7, 5, 0.0, 5)
    assert config.actor.recorded_test_samples is None and config.actor.test_samples == 512
    assert not config.finetune.lora.enabled and config.finetune.keep_best is None
    assert (config.wandb.mode, config.wandb.wandb_name) == ("disabled", None)
    assert config.world.num_finetune_ranks is None and config.world.finetune_fraction == 0
    assert config.dataset_loader_params["num_test"] == 512 and config.custom == ODD


def test_a_run_whose_configuration_has_former_keys_is_evaluated(run: RunDir, tmp_path: Path) -> None:
    with run.config_file.open("a") as file:
        file.write("weight_broadcast: true\nsandbox_timeout: 4\n")
    assert evaluated(tmp_path / "x", str(run.root)).custom == ODD


def test_what_is_written_wins(run: RunDir, tmp_path: Path) -> None:
    """Evaluation follows the sampling of training in what it followed before."""
    words = ["llm.parameters.temperature=0.3", "llm.parameters.max_tokens=7"]
    words += ["model_path=other", "streams.fsync=always"]
    config = evaluated(tmp_path / "x", str(run.root), "--output", "there", *words)
    assert (config.model_path, config.output_dir) == ("other", "there")
    assert (config.test_llm.parameters.temperature, config.test_llm.parameters.max_tokens) == (0.3, 5)
    assert config.streams.fsync == "always"


@pytest.mark.parametrize(
    ("words", "plain", "sets"),
    [
        ([], ["test"], [("hard", 4, None)]),
        (["-k", "8"], [], [("test", 8, None), ("hard", 8, None)]),
        (["--tasks", "hard"], [], [("hard", 4, None)]),
        (["--tasks", "hard,a", "-k", "2"], [], [("hard", 2, None), ("a", 2, None)]),
        (["--tasks", "test", "-k", "2"], [], [("test", 2, 512)]),
        (["--tasks", "a"], ["a"], []),
    ],
)
def test_tasks_and_samples(run: RunDir, tmp_path: Path, words: list[str], plain: list[str], sets: list[Any]) -> None:
    config = evaluated(tmp_path / "x", str(run.root), *words)
    assert config.plain_test_names == plain
    assert [(each.name, each.k, each.problems) for each in config.eval] == sets
    assert all(each.temperature == 0 for each in config.eval if each.name == "hard")


@pytest.mark.parametrize(
    ("words", "plain", "sets"),
    [
        ([], ["a.jsonl", "org/b"], []),
        (["-k", "4"], [], [("a.jsonl", 4), ("org/b", 4)]),
        (["--tasks", "a.jsonl"], ["a.jsonl"], []),
        (["--tasks", "org/c,a.jsonl", "-k", "2"], [], [("org/c", 2), ("a.jsonl", 2)]),
    ],
)
@pytest.mark.parametrize("of_run", [False, True])
def test_prompts_of_an_agent_function(
    of_run: bool, words: list[str], plain: list[str], sets: list[Any], tmp_path: Path
) -> None:
    """A run has settled them, the configuration of a model has not yet; the tokenizer is that of the model."""
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "f.py").touch()
    (mine / "a.jsonl").touch()
    agent = "agent: {prompt_data: org/train, eval_data: 'a.jsonl,org/b'}"
    (mine / "own.yaml").write_text(f"defaults: [agent, _self_]\nactor: {{agent_func_path: f.py}}\n{agent}\n")
    place, task = "org/name", ["--config-dir", str(mine), "--config-name", "own"]
    if of_run:
        run = RunDir(tmp_path / "run")
        composed = compose([*task, f"output_dir={run.root}", "model_path=first"]).config
        assert composed is not None
        save_config(composed, run.config_file)
        export(run.current_model)
        place, task = str(run.root), ["--config-dir", str(mine), "model_path=org/name"]
    config = evaluated(tmp_path / "x", place, *task, *words)
    names = [Path(name).name if Path(name).is_file() else name for name in config.plain_test_names]
    assert names == plain
    assert [(each.name.replace(f"{mine}/", ""), each.k) for each in config.eval] == sets
    assert config.model_path == config.dataset_loader_params["model_path"] == "org/name"


def test_the_best_model_of_a_run_comes_first_and_any_of_its_models_can_be_named(run: RunDir, tmp_path: Path) -> None:
    run.best_model.symlink_to(export(run.finetune / "evaluated" / "7"))
    assert evaluated(tmp_path / "x", str(run.root)).model_path == str(run.finetune / "evaluated" / "7")
    early = export(run.finetune / "intermediate" / "3")
    config = evaluated(tmp_path / "y", str(early))
    assert (config.model_path, config.output_dir, config.llm.parameters.temperature) == (
        str(early), "results/3-evaluation", 0.7
    )  # fmt: skip
    task = evaluated(tmp_path / "z", str(early), "--config-name", "guessing")
    assert (task.model_path, task.llm.parameters.temperature, task.eval) == (str(early), 1.0, [])


def test_a_run_without_a_model_says_so(run: RunDir, tmp_path: Path) -> None:
    (run.current_model / "config.json").unlink()
    with pytest.raises(ConfigError) as refused:
        evaluated(tmp_path / "x", str(run.root))
    assert refused.value.key == "MODEL_OR_RUN" and "model_path=" in refused.value.next_step
    assert evaluated(tmp_path / "y", str(run.root), "model_path=other").model_path == "other"


def test_a_model_needs_held_out_sets(tmp_path: Path) -> None:
    config = evaluated(tmp_path / "x", "org/name", "--config-name", "quickstart")
    assert (config.model_path, config.output_dir) == ("org/name", "results/org-name-evaluation")
    assert config.wandb.mode == "disabled"
    with pytest.raises(ConfigError) as refused:
        evaluated(tmp_path / "y", "org/name", "test_dataset_names=[]")
    assert refused.value.key == "test_dataset_names"


def test_a_task_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: [base_cpu, _self_]\ntest_dataset_names: [a]\nseed: 5\n")
    config = evaluated(tmp_path / "x", "org/name", "--config-dir", str(tmp_path), "--config-name", "mine")
    assert (config.seed, config.test_dataset_names) == (5, ["a"])
