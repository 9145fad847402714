"""The whole pipeline with the real parts: vLLM server, trainer, weights broadcast into sequences in flight."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from fakes.whole_run import WholeRun, environment, make_whole_run

pytestmark = pytest.mark.timeout(1300)  # more than a whole run is waited for
STEPS = 8


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    """With evaluations in the middle that are recorded, and the best version kept; nobody changes its directory."""
    run = make_whole_run(tmp_path_factory.mktemp("whole_run"))
    ended = run.run("eval_every_n_versions=4", "actor.recorded_test_samples=32", "finetune.keep_best=success_rate")
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}\n{run.logs()}"
    return run


def test_the_summary_says_what_happened(finished: WholeRun) -> None:
    summary = finished.summary
    assert summary["status"] == "completed"
    assert summary["reason"] is None
    assert summary["steps"] == STEPS
    assert summary["weight_updates"] == STEPS + 1
    assert summary["logprob_abs_diff_mean"] < 1e-3
    assert summary["fates"]["trained"] == summary["samples_trained"] >= STEPS * 64
    assert 0 <= summary["stall_fraction"] < 1
    assert summary["mean_lag_versions"] >= 0
    assert summary["seconds"] > 0


def test_the_task_is_learned(finished: WholeRun) -> None:
    summary = finished.summary
    assert 0.2 < summary["success_before"] < 0.8, "random weights give an even id about half of the time"
    assert summary["success_after"] > summary["success_before"] + 0.1


def test_every_trained_sample_is_trained_once(finished: WholeRun) -> None:
    batches = finished.records("training_data")
    ids = [sample["id"] for batch in batches for sample in batch["samples"] if batch["step"] <= STEPS]
    assert max(Counter(ids).values()) == 1
    fates = Counter()
    for record in finished.records("fates"):
        if record["fate"] == "trained":
            fates.update(record["sample_ids"])
    assert set(fates.values()) == {1}
    assert set(fates) == set(ids)


def test_spans_cover_the_output_and_lag_is_bounded(finished: WholeRun) -> None:
    """max_lag = batch: a token is at most ceil(64 / 64) + 1 versions old, plus what its rollout spans (1 here)."""
    for batch in finished.records("training_data"):
        for sample in batch["samples"]:
            trained = sum(label != -100 for label in sample["labels"])
            spans = sample["version_spans"]
            assert spans[0][1] == 0 and spans[-1][2] == trained == len(sample["logprobs"])
            assert all(left[2] == right[1] for left, right in itertools.pairwise(spans))
            if batch["step"] <= STEPS:
                assert batch["step"] - 1 - spans[0][0] <= 3


def test_the_final_model_is_a_hugging_face_folder(finished: WholeRun) -> None:
    from transformers import AutoModelForCausalLM

    before = AutoModelForCausalLM.from_pretrained(finished.model_path).state_dict()
    after = AutoModelForCausalLM.from_pretrained(finished.output_dir / "finetune" / "current").state_dict()
    assert before.keys() == after.keys()
    assert any(not before[name].equal(after[name]) for name in before)


#: vLLM alone, as its users call it.
STOCK_VLLM = """
import json, sys
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=64, seed=1)
    chats = [[{"role": "user", "content": f"Say something about {word}"}] for word in range(32)] * 64
    answers = llm.chat(chats, SamplingParams(max_tokens=1, temperature=1.0), use_tqdm=False)
    print(json.dumps([[answer.prompt_token_ids, answer.outputs[0].token_ids[0]] for answer in answers]))
"""


@pytest.mark.slow
def test_the_final_model_answers_in_other_programs_as_it_does_here(finished: WholeRun) -> None:
    """With the tokenizers and templates that they choose themselves: equal prompts, equal success."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = finished.output_dir / "finetune" / "current"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    shares = []
    prompts = []
    for word in range(32):
        chat = [{"role": "user", "content": f"Say something about {word}"}]
        prompts.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"])
        with torch.no_grad():
            shares.append(float(model(torch.tensor([prompts[-1]])).logits[0, -1].softmax(-1)[::2].sum()))
    groups = finished.records("actor")
    sent = [s["input_ids"][: len(s["input_ids"]) - len(s["logprobs"])] for group in groups for s in group["samples"]]
    assert {tuple(ids) for ids in prompts} == {tuple(ids) for ids in sent}
    environ = {**environment(), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [sys.executable, "-c", STOCK_VLLM, str(folder)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environ, check=True)
    answers = next(json.loads(line) for line in ended.stdout.splitlines() if line.startswith("[["))
    assert [ids for ids, _ in answers] == prompts * 64
    in_transformers, in_vllm = sum(shares) / 32, sum(token % 2 == 0 for _, token in answers) / len(answers)
    # 0.05 is five standard errors of 2,048 answers; the evaluation of 128 alone has one of 0.04.
    assert in_vllm == pytest.approx(in_transformers, abs=0.05)
    assert finished.summary["success_after"] == pytest.approx(in_transformers, abs=0.16)


def test_what_the_user_sees_is_there(finished: WholeRun) -> None:
    names = {"summary.json", "metrics.jsonl", "learning_curve.png", "launch.log"}
    assert names <= {path.name for path in finished.output_dir.iterdir()}
    assert (finished.output_dir / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    for job in ("actor_0", "actor_llm_0", "preprocessor_0", "finetune_0"):
        assert {"command.sh", "stdout.log", "stderr.log"} <= {
            path.name for path in (finished.output_dir / job).iterdir()
        }


def test_every_number_is_explained(finished: WholeRun) -> None:
    rows = [json.loads(line) for line in (finished.output_dir / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row}
    assert {"finetune/loss", "actor/reward_mean", "preprocessor/queue_batches", "weight_update/total_s"} <= names
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    rows_of_page = re.findall(r"^\| `([a-z_]+/[^`]+)` \|", page, flags=re.MULTILINE)
    explained = re.compile("|".join(re.sub(r"<[a-z_]+>", "[^/]+", name) for name in rows_of_page))
    assert [name for name in names - {"time", "step", "source"} if not explained.fullmatch(name)] == []


def test_what_the_model_said_can_be_read(finished: WholeRun) -> None:
    """`samples` gives back the recorded ids, and their text is what the model's own tokenizer makes of them."""
    from pipelinerl.llm.tokens import load_tokenizer

    tokenizer = load_tokenizer(str(finished.model_path))
    recorded = {sample["id"]: sample for group in finished.records("actor") for sample in group["samples"]}
    step = next(batch for batch in finished.records("training_data") if batch["step"] == STEPS)
    command = [sys.executable, "-m", "pipelinerl", "samples", str(finished.output_dir)]
    options = {"capture_output": True, "text": True, "timeout": 120, "check": True, "env": environment()}
    shown = subprocess.run([*command, "--json", "--step", str(STEPS), "--last", "1000"], **options)
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    assert {line["sample_id"] for line in lines} == {sample["id"] for sample in step["samples"]}
    for line in lines:
        sample = recorded[line["sample_id"]]
        prompt, output = line["turns"]
        assert prompt["token_ids"] + output["token_ids"] == sample["input_ids"]
        assert prompt["text"] == tokenizer.decode(prompt["token_ids"])
        assert "Say something about" in prompt["text"]
        assert line["reward"] == float(output["token_ids"][0] % 2 == 0)
        assert line["fate"] == f"trained in step {STEPS}"
        assert line["last_version"] < STEPS
    shown = subprocess.run([*command, "--best", "2"], **options)
    assert shown.stderr == "" and "\x1b" not in shown.stdout
    assert shown.stdout.count("\n  reward 1, success") == 2


def test_what_it_said_on_held_out_problems_can_be_read(finished: WholeRun) -> None:
    """Rollouts of evaluations are recorded beside training, which never sees them, and agree with the averages."""
    evaluations = {record["due_version"]: record for record in finished.records("evaluation")}
    assert list(evaluations) == [0, 4, STEPS]
    recorded = finished.records("evaluation_rollouts")
    assert Counter(record["due_version"] for record in recorded) == dict.fromkeys(evaluations, 32)
    trained = {sample["id"] for batch in finished.records("training_data") for sample in batch["samples"]}
    assert trained.isdisjoint(sample["id"] for record in recorded for sample in record["samples"])
    command = [sys.executable, "-m", "pipelinerl", "samples", str(finished.output_dir), "--evaluation"]
    options = {"capture_output": True, "text": True, "timeout": 120, "check": True, "env": environment()}
    shown = subprocess.run([*command, "--version", str(STEPS), "--last", "99", "--json"], **options)
    lines = [json.loads(line) for line in shown.stdout.splitlines()]
    assert len(lines) == 32 and len({line["rollout_id"] for line in lines}) == 32
    for line in lines:
        prompt, output = line["turns"]
        assert f"Say something about {json.loads(line['problem'])['word']}" in prompt["text"]
        assert line["success"] == (line["reward"] == 1.0) == (output["token_ids"][0] % 2 == 0)
        assert (line["min_version"], line["max_version"], line["is_final"], line["has_result"]) == (8, 8, True, True)
        assert (line["dataset"], line["fate"], line["failure"]) == ("test", "not trained", "")
    # A quarter of the rollouts; 0.3 is four standard errors.
    final = evaluations[STEPS]
    assert abs(sum(line["success"] for line in lines) / 32 - final["success_rate"]) < 0.3
    audit = [sys.executable, "-m", "pipelinerl", "audit", str(finished.output_dir), "--json"]
    report = json.loads(subprocess.run(audit, **options).stdout)
    assert report["clean"] and report["fates"]["trained"] == finished.summary["samples_trained"]
    assert sum(report["fates"].values()) == report["submitted"]


def test_the_best_version_by_evaluation_is_kept(finished: WholeRun) -> None:
    """Of the evaluations that began with the version they were due at; the final one ends behind the trainer."""
    from transformers import AutoModelForCausalLM

    evaluations = [
        record for record in finished.records("evaluation") if record["min_version"] == record["due_version"]
    ]
    assert {0, STEPS} <= {record["due_version"] for record in evaluations}
    best = max(evaluations, key=lambda record: (record["success_rate"], record["min_version"] - record["max_version"]))
    folder = finished.output_dir / "finetune" / "best"
    note = json.loads((folder / "evaluation.json").read_text())
    assert (note["version"], note["value"]) == (best["due_version"], best["success_rate"])
    assert (note["metric"], note["num_rollouts"], note["dataset_name"]) == ("success_rate", 128, "test")
    assert finished.summary["best_model"] == {key: note[key] for key in finished.summary["best_model"]}
    assert [path.name for path in (finished.output_dir / "finetune" / "evaluated").iterdir()] == [str(note["version"])]
    kept = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    if note["version"] == STEPS:
        current = AutoModelForCausalLM.from_pretrained(finished.output_dir / "finetune" / "current").state_dict()
        assert all(kept[name].equal(current[name]) for name in current)


def test_nothing_is_left_running(finished: WholeRun) -> None:
    assert finished.living_processes() == []


def test_o5_no_secret_is_written(finished: WholeRun) -> None:
    """The servers' token travels by environment only; nothing in the run directory names it."""
    for path in finished.output_dir.rglob("*"):
        if path.is_file() and path.suffix in {".sh", ".json", ".yaml", ".log"}:
            text = path.read_text(errors="replace")
            assert "PIPELINERL_SERVER_TOKEN=" not in text, path
            assert "Bearer " not in text, path


def test_a_finished_directory_is_not_written_over(finished: WholeRun) -> None:
    before = (finished.output_dir / "summary.json").read_text()
    result = finished.run()
    assert result.returncode in (0, 2)
    assert "Traceback" not in result.stdout + result.stderr
    assert (finished.output_dir / "summary.json").read_text() == before


@pytest.mark.slow
def test_two_servers_and_two_ranks(tmp_path: Path) -> None:
    run = make_whole_run(tmp_path)
    result = run.run("world.num_actor_llms=2", "world.num_finetune_ranks=2")
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}\n{run.logs()}"
    assert run.summary["weight_updates"] == STEPS + 1
    assert run.summary["logprob_abs_diff_mean"] < 1e-3
    assert run.summary["success_after"] > run.summary["success_before"]
    assert run.living_processes() == []
