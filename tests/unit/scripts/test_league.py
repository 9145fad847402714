"""The comparison with TRL: rewards by hand, both systems' results to one table, and arguments that cannot be run."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from fakes.script_module import load_script

from pipelinerl.config.compose import compose


@pytest.fixture
def league(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("league", monkeypatch)


@pytest.fixture
def task(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_script("league_task", monkeypatch)


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("<answer>-12</answer>", "-12", 1.0),
        ("It is <answer> 7 </answer>.", "7", 1.0),
        ("<answer>12</answer>", "-12", 0.0),
        ("-12", "-12", 0.0),
        ("<answer>seven</answer>", "7", 0.0),
        ("<answer>7", "7", 0.0),
        ("Anna, a cat!", "", 4 / 8),
        ("1 2 3", "", 0.0),
        ("", "", 0.0),
    ],
)
def test_rewards(task: ModuleType, text: str, answer: str, expected: float) -> None:
    assert task.reward(text, answer) == expected


def test_problems(task: ModuleType) -> None:
    """The same for both systems, with right answers, and stories of very different lengths."""
    sums, stories = task.problems("sums", 300), task.problems("stories", 300)
    assert sums == task.problems("sums", 300)
    for problem in sums:
        left, sign, right, *_ = problem["messages"][-1]["content"].split()
        value = int(left) + int(right) if sign == "+" else int(left) - int(right)
        assert problem["answer"] == str(value)
    assert len({problem["messages"][-1]["content"] for problem in sums}) > 280
    lengths = {problem["messages"][0]["content"].split("about ")[-1] for problem in stories}
    assert lengths == {f"{words} words." for words in (15, 40, 90, 180, 350)}
    assert {problem["answer"] for problem in stories} == {""}


def write_run(folder: Path) -> Path:
    """The rows of three steps, 10 s apart, of 512 samples; the first weights arrive at time 100."""
    rows: list[dict[str, object]] = [
        {"time": 90.0, "source": "actor_0", "actor/reward_mean": 0.0},
        {"time": 100.0, "step": 0, "source": "weight_update"},
    ]
    for step, (reward, lag, crossed) in enumerate([(0.1, 0.0, 0), (0.4, 1.0, 64), (0.6, 2.0, 192)], start=1):
        row = {"time": 100.0 + 10 * step, "step": step, "source": "finetune_0", "finetune/step_s": 10.0}
        row |= {"finetune/samples": 512.0, "finetune/output_tokens": 5120.0, "finetune/reward_mean": reward}
        row |= {"finetune/lag_mean_versions": lag, "finetune/multi_version_samples": float(crossed)}
        rows += [row, {"time": row["time"], "step": step, "source": "weight_update"}]
    folder.mkdir()
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_figures_of_our_run(league: ModuleType, tmp_path: Path) -> None:
    steps = league.our_steps(write_run(tmp_path / "run"))
    assert league.figures(steps, 0.4) == {
        "samples_per_s": 51.2,
        "seconds_to_success": 20.0,
        "output_tokens_per_s": 512.0,
        "lag": 1.5,
        "multi_version_percent": 25.0,
    }
    assert league.figures(steps, 0.7)["seconds_to_success"] is None
    assert league.figures(steps, None)["seconds_to_success"] is None


def test_figures_of_trl(league: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What both of its trainers log, through the file that the runner writes."""
    runner = load_script("league_trl", monkeypatch)
    colocated = [{"reward": 0.5, "completions/mean_length": 10.0, "step_time": 3.0}, {"train_runtime": 9.0}]
    other = {"batch/samples_per_step": 480.0, "batch/trained_tokens_per_step": 4800.0, "sample/staleness_mean": 1.25}
    asynchronous = [{"reward": 0.5, **other}]
    lines = [runner.step_of(logs, 512, 4.0) for logs in [*colocated, *asynchronous]]
    assert lines[1] is None
    log = tmp_path / "steps.jsonl"
    log.write_text("".join(json.dumps({**line, "seconds": s}) + "\n" for s in (4.0, 8.0) for line in lines[:1]))
    assert league.figures(league.trl_steps(log), 0.4) == {
        "samples_per_s": 128.0,
        "seconds_to_success": 4.0,
        "output_tokens_per_s": 1280.0,
        "lag": 0.0,
        "multi_version_percent": 0.0,
    }
    found = league.figures([lines[2], {**lines[2], "seconds": 12.0}], 0.4)
    assert (found["samples_per_s"], found["lag"], found["multi_version_percent"]) == (60.0, 1.25, None)
    completions = [[{"role": "assistant", "content": "<answer>3</answer>"}], [{"role": "assistant", "content": "3"}]]
    assert runner.rewards(completions, answer=["3", "3"], prompts=[]) == [1.0, 0.0]


def test_the_table(league: ModuleType) -> None:
    """Medians with ranges, ratios that say how many times as good, lost rows, figures that are not known, errors."""

    def run(speed: float, seconds: float | None = None, lag: float = 0.0, crossed: float | None = 0.0) -> dict:
        names = ("samples_per_s", "seconds_to_success", "output_tokens_per_s", "lag", "multi_version_percent")
        return dict(zip(names, (speed, seconds, 10 * speed, lag, crossed), strict=True))

    ours = [run(900, 30, 1.0, 6.25), run(1100, 20, 1.0, 6.25), run(1000, None, 1.0, 6.25)]
    trl = [run(250, 20), run(260, 10), {"error": "out of memory | 3 GiB"}]
    results = {
        "sums": {"ours": ours, "trl": trl},
        "stories": {"ours": [run(20)], "trl": [run(25, crossed=None)]},
    }
    lines = league.table(results, gpus=1).splitlines()
    assert lines[0] == "| task | figure | TRL, colocated | pipelinerl | ratio |"
    cells = {tuple(line.strip("| ").split(" | ")[:2]): line.strip("|").split(" | ")[2:] for line in lines[2:]}
    found = {key: [cell.strip() for cell in row] for key, row in cells.items()}
    assert found["sums", "samples/s"] == ["255 (250 - 260)", "1,000 (900 - 1,100)", "3.92"]
    seconds = "seconds to a training success of 0.4"
    assert found["sums", seconds] == ["15 (10 - 20)", "25 (20 - 30), 2 of 3 runs", "0.60 ✗"]
    assert found["sums", "lag, versions"] == ["0 (0 - 0)", "1 (1 - 1)", ""]
    assert found["stories", "samples/s"] == ["25", "20", "0.80 ✗"]
    assert found["stories", "samples with tokens of several versions, %"] == ["-", "0", ""]
    assert ("stories", seconds) not in found
    assert any("1 of 3" in line and "out of memory / 3 GiB" in line for line in lines)


def test_the_page_keeps_the_rest(league: ModuleType) -> None:
    page = f"before\n{league.BEGIN}\nold\n{league.END}\nafter\n"
    assert league.renew(page, "new") == f"before\n{league.BEGIN}\nnew\n{league.END}\nafter\n"
    assert league.BEGIN in league.PAGE.read_text() and league.END in league.PAGE.read_text()
    with pytest.raises(SystemExit):
        league.renew("no marks", "new")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("--model x", "oracle"),
        ("--model x --systems ours", "--rehearse"),
        ("--model x --tasks riddles", "riddles"),
        ("--model x --systems theirs", "theirs"),
        ("--model x --seeds 0", "--seeds"),
        ("--model x --systems ours --seeds 2 2 GPU", "--seeds"),
        ("--model x --servers-per-gpu many", "many"),
        ("--systems ours GPU", "--model"),
        ("--model x --systems ours --steps 1 GPU", "--steps"),
        ("--systems ours --rehearse --write-docs", "--write-docs"),
        ("--systems ours --rehearse --out .", "--out"),
    ],
)
def test_arguments_that_cannot_be_run(
    league: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    words: str,
    part: str,
) -> None:
    """One line that names what is wrong and exit code 2, before anything starts."""
    (tmp_path / "full").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    gpus = 1 if "GPU" in words else 0
    monkeypatch.setattr(league.torch, "cuda", SimpleNamespace(device_count=lambda: gpus))
    with pytest.raises(SystemExit) as caught:
        league.arguments(["--out", "new", *words.replace("GPU", "").split()])
    assert caught.value.code == 2
    assert part in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("where", ["one GPU", "rehearsal"])
def test_our_configuration_composes(
    league: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    monkeypatch.setattr(league.torch, "cuda", SimpleNamespace(device_count=lambda: 1))
    words = ["--rehearse"] if where == "rehearsal" else ["--model", "x", "--servers-per-gpu", "2"]
    args = league.arguments([*words, "--systems", "ours", "--out", str(tmp_path / "out"), "--", "max_lag=64"])
    args.model = "x"
    config = compose(league.our_words(args, "stories", 3, tmp_path)).config
    assert (config.seed, config.attempts, config.max_lag) == (3, 8, 64)
    assert config.finetune.rl.aggregation == "sample_mean" and config.dataset_loader_params == {"task": "stories"}
    samples = config.finetune.train_batch_size * config.finetune.gradient_accumulation_passes
    if where == "rehearsal":
        assert (samples, config.world.device, config.llm.parameters.max_tokens) == (32, "cpu", 32)
    else:
        assert (samples, config.world.servers_per_gpu, config.llm.parameters.max_tokens) == (512, 2, 512)
        assert config.vllm_config.vllm_kwargs["compilation-config"]["cudagraph_mode"] == "FULL_DECODE_ONLY"
