"""All files of PipelineRL's `conf/`, in shape: what is translated, and what is said to be missing."""

from __future__ import annotations

import contextlib
import inspect
import io
from importlib import import_module
from pathlib import Path

import pytest
import yaml

from pipelinerl.__main__ import main
from pipelinerl.config.compose import compose
from pipelinerl.config.former_keys import LACKING_DATA
from pipelinerl.config.run import RunConfig
from pipelinerl.domains.data import SPLITS
from pipelinerl.domains.shapes import KNOWN
from pipelinerl.launch import main as launch

SHAPES = yaml.safe_load((Path(__file__).parents[2] / "fakes" / "former_conf.yaml").read_text(encoding="utf-8"))
NAMES = [name for name in SHAPES if "/" not in name]
#: What has no translation in files that can be planned, by the beginnings of the lines about it.
TRANSLATED: dict[str, tuple[str, ...]] = {
    "base": (),
    "base_4gpu": (),
    "debug": (),
    "guessing": (),
    "test": (),
    "counting": (),
    "deepscaler15b": (),
    "math": (),
    "coding": (),
    "ifeval": (),
    "fn_calling": ("train_dataset_names", "test_dataset_names"),
    "logic": ("train_dataset_names", "test_dataset_names"),
}
LACKING = {
    "tir": "python_tool_shaping",
    "counting_tapeagent": "actor.rollout_policy",
    "chartqa": "finetune.model_class",
    "miniwob": "environment",
    "miniwob_grpo": "defaults",
    "miniwob_uic_grpo": "defaults",
    "miniwob_uic_ppo": "defaults",
}


Results = dict[str, tuple[int, str, list[str]]]


def converted(file: Path) -> tuple[int, str, list[str]]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["convert", str(file)])
    return code, out.getvalue(), err.getvalue().splitlines()


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("old")
    for name, content in SHAPES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return folder


@pytest.fixture(scope="module")
def results(old: Path) -> Results:
    return {name: converted(old / f"{name}.yaml") for name in NAMES}


@pytest.fixture(scope="module")
def new(results: Results, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All translated files in one folder: `base` of PipelineRL hides ours."""
    folder = tmp_path_factory.mktemp("new")
    for name, (_, text, _) in results.items():
        (folder / f"{name}.yaml").write_text(text)
    return folder


def composed(folder: Path, name: str) -> RunConfig:
    config = compose(["--config-dir", str(folder), "--config-name", name, "output_dir=run"]).config
    assert config is not None
    return config


def cannot(lines: list[str]) -> list[str]:
    return [line.split()[1].rstrip(":") for line in lines if line.startswith("cannot ")]


def test_every_file_is_here() -> None:
    assert len(NAMES) == 19 and {*TRANSLATED, *LACKING} == set(NAMES)


@pytest.mark.parametrize("name", TRANSLATED)
def test_it_can_be_planned_alone_and_with_the_others(
    name: str,
    results: Results,
    new: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, text, lines = results[name]
    assert (code, sorted(cannot(lines))) == (2 if TRANSLATED[name] else 0, sorted(TRANSLATED[name]))
    (tmp_path / f"{name}.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6,7")
    assert launch(["--config-dir", str(tmp_path), "--config-name", name, "output_dir=run", "dry_run=true"]) == 0
    assert "--job finetune_0" in capsys.readouterr().out and not Path("run").exists()
    assert composed(new, name).finetune.samples_per_step == composed(tmp_path, name).finetune.samples_per_step


@pytest.mark.parametrize("name", LACKING)
def test_it_says_what_is_missing(name: str, results: Results) -> None:
    code, _, lines = results[name]
    assert code == 2 and LACKING[name] in cannot(lines)


def test_the_settings_of_pipelinerl_come_with_its_base(new: Path) -> None:
    """Steps for samples: 20480 / 1024 between evaluations. A clip range of 0.03 bounds the ratio by 1.03."""
    config = composed(new, "base")
    tuned = config.finetune
    assert (config.eval_every_n_versions, config.attempts, config.max_lag, config.seed) == (20, 8, None, 7)
    assert (tuned.max_train_steps, tuned.weight_decay, tuned.learning_rate) == (90000, 0.01, 2e-6)
    assert (tuned.rl.policy_loss, tuned.rl.loss.clamp, config.backend.type) == ("reinforce", 1.03, "deepspeed")
    assert config.rewards.correct_answer_not_finished == 1.0
    assert config.vllm_config.option("return-tokens-as-token-ids")[1] is None
    assert composed(new, "debug").streams.backend == "redis"


def test_intervals_that_are_included_follow_the_samples_per_step(tmp_path: Path) -> None:
    """1024 samples between updates and 20480 between evaluations; 1024 in a step below, 512 and 256 above it."""
    sizes = {"train_batch_size": 1, "gradient_accumulation_passes": 1024, "weight_update_interval": 1024}
    files = {
        "below": {"finetune": sizes, "eval_every_n_versions": 20480},
        "half": {"defaults": ["below"], "finetune": {"gradient_accumulation_passes": 512}},
        "quarter": {"defaults": ["half"], "finetune": {"gradient_accumulation_passes": 256}},
        "same": {"defaults": ["below"], "finetune": {"gradient_accumulation_passes": 256, "train_batch_size": 4}},
    }
    for name, content in files.items():
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(content))
    steps = {}
    for name in files:
        _, text, lines = converted(tmp_path / f"{name}.yaml")
        data = yaml.safe_load(text)
        steps[name] = (data.get("eval_every_n_versions"), data["finetune"].get("weight_update_interval"))
        said = any("eval_every_n_versions" in line for line in lines)
        assert said == (name != "same")
    assert steps == {"below": (20, 1), "half": (40, 2), "quarter": (80, 4), "same": (None, None)}


def test_what_a_file_says_reaches_the_run(new: Path) -> None:
    config = composed(new, "deepscaler15b")
    tuned = config.finetune
    # 12800 samples between evaluations and 256 between updates, 128 in a step.
    assert (config.eval_every_n_versions, tuned.weight_update_interval, tuned.rl.aggregation) == (100, 2, "sample_mean")
    assert config.train_dataset_names == ["deepscaler_preview"] and config.backend.config == "deepspeed_stage1_bf16"
    assert config.vllm_config.option("max-num-seqs")[1] == 300
    # 15000 tokens do not fit into a context of 10000.
    assert config.test_llm.parameters.max_tokens == 10000 - 1024
    assert (config.llm.parameters.max_tokens, config.test_llm.parameters.temperature) == (8000, 0.5)


def test_samples_that_cannot_be_trained_are_not_sampled(new: Path) -> None:
    config = composed(new, "base_4gpu")
    assert (config.finetune.seq_length, config.vllm_config.number("max-model-len")) == (4000, 4000)
    assert (config.llm.parameters.max_tokens, config.test_llm.parameters.max_tokens) == (1200, 1200)


@pytest.mark.parametrize("name", ["math", "coding", "fn_calling", "ifeval", "logic", "counting"])
def test_the_loader_takes_its_arguments_and_knows_the_data_sets(name: str, new: Path) -> None:
    config = composed(new, name)
    module, _, function = str(config.dataset_loader).rpartition(".")
    loader = getattr(import_module(module), function)
    inspect.signature(loader).bind(config.train_dataset_names, **config.dataset_loader_params)
    known = {*SPLITS, *KNOWN.get(name, ()), *LACKING_DATA}
    assert {*config.train_dataset_names, *config.test_dataset_names} <= known
    assert not LACKING_DATA.keys() & KNOWN.get(name, {}).keys()
    kept = {"coding": {"max_tests": 4, "seed": 3}, "fn_calling": {"limit": 500, "seed": 3}, "math": {}, "counting": {}}
    assert config.dataset_loader_params == kept.get(name, {"seed": 3})


def test_another_loss_keeps_the_clip_range_and_brings_its_value_head(new: Path) -> None:
    found = yaml.safe_load((new / "miniwob.yaml").read_text())
    rl = found["finetune"]["rl"]
    assert (rl["policy_loss"], rl["advantage_estimator"], rl["value_loss_coef"]) == ("ppo", "gae", 0.2)
    assert (rl["epsilon_low"], rl["epsilon_high"], rl["clamp"], found["attempts"]) == (0.03, 0.03, None, 1)
    assert found["defaults"] == ["base", {"override streams": "redis"}, "_self_"]
    assert "max_tokens" not in found["test_llm"]["parameters"]


def test_files_of_groups_and_packages(old: Path, tmp_path: Path) -> None:
    """A group's file is written with all its keys from the root: some of them are no longer in the group."""
    (old / "more").mkdir(exist_ok=True)
    (old / "more" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [/base]\nactor: {task_prompt: hello}\nseed: 1e1\n"
    )
    code, text, _ = converted(old / "finetune" / "grpo.yaml")
    (tmp_path / "finetune").mkdir()
    (tmp_path / "finetune" / "mine.yaml").write_text(text)
    (tmp_path / "task.yaml").write_text("defaults: [base, override finetune: mine, _self_]")
    config = composed(tmp_path, "task")
    rl = config.finetune.rl
    assert (code, config.attempts, config.finetune.max_train_steps) == (0, 6, 90000)
    assert (rl.policy_loss, rl.loss.epsilon_low, rl.loss.epsilon_high) == ("ppo", 0.03, 0.03)
    code, text, _ = converted(old / "more" / "mine.yaml")
    assert code == 0 and yaml.safe_load(text) == {
        "defaults": ["/base", "_self_"],
        "seed": 10.0,
        "custom": {"task_prompt": "hello"},
    }


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("defaults: [nothing]", "defaults"),
        ("defaults: [mine]", "defaults"),
        ("defaults: [{a: b, streams: redis}, 3]", "defaults"),
        ("defaults: [{domain_mix: mine}]", "defaults"),
        ("actor: {max_retries: '${jobs}'}", "actor.max_retries"),
        ("sandbox_endpoint: '${hydra:runtime.cwd}/x'", "sandbox_endpoint"),
        ("environments: [{_target_: my.Environment}]", "environments"),
        ("eval_every_n_versions: '${custom.often}'", "eval_every_n_versions"),
    ],
)
def test_what_cannot_be_followed_is_said(text: str, key: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    code, _, lines = converted(tmp_path / "mine.yaml")
    assert code == 2 and set(cannot(lines)) == {key}


@pytest.mark.parametrize("text", ["a: [", "- 1", "a: ${b"])
def test_what_is_no_configuration_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    assert main(["convert", str(tmp_path / "mine.yaml")]) == 2
    assert capsys.readouterr().err.count("\n") >= 1
