"""The agent function: shapes that it may return, ids that are kept, rewards, metrics, and errors of either kind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.fake_server import FakeServer
from transformers import PreTrainedTokenizerFast

from pipelinerl.actor.problems import ProblemOrder
from pipelinerl.agents.agent_func import generate_agent_rollout, read_step
from pipelinerl.agents.prompt_data import load_prompts
from pipelinerl.config.agent import AGENT_ROLLOUT, PROMPT_LOADER
from pipelinerl.config.compose import compose
from pipelinerl.config.epochs import epoch_notes, steps_of_epochs
from pipelinerl.domains.problem_sets import load_problem_sets
from pipelinerl.errors import ConfigError, DomainError, RolloutError
from pipelinerl.llm import TrainableLLM
from pipelinerl.llm.client import open_session
from pipelinerl.llm.sample_builder import build_samples
from pipelinerl.tiny.tokenizer import build_tokenizer

GROWS = """
import torch

async def step(state, action, label, **kwargs):
    done = state.count("again") == 2
    reward = torch.tensor([0.25])
    extra = {"length": torch.tensor(len(action)), "note": "text", "bad": float("nan"), "reward": 7, **EXTRA}
    return reward, state + action + " again", done, extra
"""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer(32)


@pytest.fixture
def server(tokenizer: PreTrainedTokenizerFast) -> Iterator[FakeServer]:
    """Answers `1`, `2`, end: the text `12` would be another token."""
    vocabulary = tokenizer.get_vocab()
    answer = [vocabulary["1"], vocabulary["2"], vocabulary["<|end|>"]]
    with FakeServer(script=lambda body: answer) as fake:
        fake.version = "0"
        yield fake


async def play(
    server: FakeServer, tokenizer: Any, source: str, folder: Path, max_model_len: int | None = None, **agent: Any
) -> Any:
    file = folder / "agent_func.py"
    file.write_text(source)
    cfg = SimpleNamespace(
        actor=SimpleNamespace(agent_func_path=str(file)),
        agent=SimpleNamespace(**{"max_steps": 8, "reward": "sum", "action_special_tokens": False, **agent}),
    )
    llm = TrainableLLM(server.url, "actor", tokenizer, {"max_tokens": 9, "temperature": 1.0}, token=server.token)
    llm.max_model_len = max_model_len
    async with open_session() as session:
        return await generate_agent_rollout(cfg, llm, {"state": "go", "label": "x", "dataset": "train"}, session)


async def test_ids_are_kept_while_the_state_grows(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    result = await play(server, tokenizer, GROWS.replace("EXTRA", "{}"), tmp_path)
    (text,) = result.training_texts
    go, again = tokenizer.encode("go"), tokenizer.encode(" again")
    answer = tokenizer.convert_tokens_to_ids(["1", "2", "<|end|>"])
    assert text.input_ids == go + answer + again + answer + again + answer
    masked = [[-100] * len(ids) for ids in (go, again, again)]
    assert text.labels == masked[0] + answer + masked[1] + answer + masked[2] + answer
    assert text.reward == 0.75 and result.metrics.success and result.dataset_name == "train"
    assert result.metrics.model_dump() == {
        "reward": 0.75, "success": True, "no_error": True, "no_answer": False,
        "num_steps": 3, "context_full": False, "length": 2.0, "extra_reward": 7.0,
    }  # fmt: skip
    build_samples(result.training_texts, group_id="g", rollout_id="r")


async def test_the_last_reward_and_success_of_the_function(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    source = GROWS.replace("EXTRA", '{"success": False}')
    result = await play(server, tokenizer, source, tmp_path, reward="last")
    assert result.metrics.reward == 0.25 and not result.metrics.success


async def test_another_state_starts_a_new_sample_and_three_values_are_enough(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    source = 'async def step(state, action, label):\n    return 1, "anew " + action, state != "go"\n'
    result = await play(server, tokenizer, source, tmp_path)
    first, second = result.training_texts
    assert second.input_ids[: len(tokenizer.encode("anew 12"))] == tokenizer.encode("anew 12")
    assert first.reward == second.reward == 2.0


@pytest.mark.parametrize(
    ("rest", "kept"),
    [
        ("<|user|>again<|assistant|>", "<|user|>again<|assistant|>"),
        ("<|end|><|user|>again<|assistant|>", "<|user|>again<|assistant|>"),
        ("<|end|><|end|>again", "<|end|>again"),
        ("<|pad|>again", "<|pad|>again"),
        (" again <|end|>", " again <|end|>"),
        ("<|end|>", ""),
        ("", ""),
    ],
)
async def test_the_prompt_is_what_the_function_wrote(
    rest: str, kept: str, server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """Special tokens too; only the end token that was sampled is not there twice."""
    source = f"async def step(state, action, label):\n    return 1, state + action + {rest!r}, state != 'go'\n"
    result = await play(server, tokenizer, source, tmp_path)
    (text,) = result.training_texts
    answer = tokenizer.convert_tokens_to_ids(["1", "2", "<|end|>"])
    between = tokenizer.encode(kept)
    assert server.requests[1]["token_ids"] == tokenizer.encode("go") + answer + between
    assert text.input_ids == tokenizer.encode("go") + answer + between + answer
    assert text.labels == [-100] * len(tokenizer.encode("go")) + answer + [-100] * len(between) + answer


async def test_an_action_with_special_tokens_is_all_that_was_sampled(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """What follows it is added as it is, also the same token again."""
    source = (
        "async def step(state, action, label):\n"
        "    return action == '12<|end|>', state + action + '<|end|><|user|>7', state != 'go'\n"
    )
    result = await play(server, tokenizer, source, tmp_path, action_special_tokens=True)
    (text,) = result.training_texts
    between = tokenizer.encode("<|end|><|user|>7")
    answer = tokenizer.convert_tokens_to_ids(["1", "2", "<|end|>"])
    assert text.input_ids == tokenizer.encode("go") + answer + between + answer
    assert (text.reward, text.output_text) == (2.0, "12<|end|>")
    assert text.text == tokenizer.decode(text.input_ids)


async def test_an_end_token_behind_an_answer_without_one_is_kept(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """The answer has nine tokens, the limit: the end of the message is the function's."""
    digits = tokenizer.convert_tokens_to_ids([*"123456789"])
    source = "async def step(state, action, label):\n    return 1, state + action + '<|end|>7', state != 'go'\n"
    with FakeServer(script=lambda body: digits) as server:
        server.version = "0"
        await play(server, tokenizer, source, tmp_path)
    end, seven = tokenizer.convert_tokens_to_ids(["<|end|>", "7"])
    assert server.requests[1]["token_ids"] == [*tokenizer.encode("go"), *digits, end, seven]


async def test_a_full_context_ends_the_episode_with_the_reward_so_far(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """`go` has 2 ids, an answer 3, ` again` 6: prompts of 2, 11 and 20 ids. In 20 ids there is room for two answers."""
    source = GROWS.replace("EXTRA", "{}")
    assert (len(tokenizer.encode("go")), len(tokenizer.encode(" again"))) == (2, 6)
    result = await play(server, tokenizer, source, tmp_path, max_model_len=20)
    (text,) = result.training_texts
    assert len(server.requests) == 2 and len(text.input_ids) == 14
    assert (text.reward, text.finished, text.finish_reason) == (0.5, False, "length")
    assert (result.metrics.num_steps, result.metrics.context_full) == (2, True)
    (sample,) = build_samples(result.training_texts, group_id="g", rollout_id="r")
    assert (sample.finished, sample.finish_reason, sample.output_tokens) == (False, "length", 6)


async def test_a_new_state_that_is_too_long_ends_the_episode_too(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    source = "async def step(state, action, label):\n    return 1, 'x' * 20, False\n"
    result = await play(server, tokenizer, source, tmp_path, max_model_len=20)
    (text,) = result.training_texts
    assert (len(text.input_ids), text.reward, text.finish_reason) == (5, 1.0, "length")


async def test_a_prompt_that_fills_the_context_fails_the_rollout(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with pytest.raises(RolloutError, match="context_overflow"):
        await play(server, tokenizer, GROWS.replace("EXTRA", "{}"), tmp_path, max_model_len=2)


async def test_an_episode_that_never_ends_is_cut(
    server: FakeServer, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    source = (
        "def step(state, action, label, sampling_params):\n"
        '    return sampling_params["max_tokens"], state + action, False\n'
    )
    result = await play(server, tokenizer, source, tmp_path, max_steps=4)
    assert result.metrics.num_steps == 4 and result.metrics.reward == 36


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (None, DomainError, "returned 'None', expected"),
        ((1, "x"), DomainError, "expected .reward, next_state, done, extra_info"),
        ((1, 2, True, {}), DomainError, "next_state of type int"),
        ((None, "x", True, {}), RolloutError, "bad_reward"),
        ((float("nan"), "x", True, {}), RolloutError, "bad_reward"),
        ((torch.rand(2), "x", True, {}), RolloutError, "bad_reward"),
    ],
)
def test_what_it_returns_is_checked(answer: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        read_step(answer, "step of agent_func.py")


def test_rewards_of_other_kinds() -> None:
    assert read_step((torch.tensor(0), "x", torch.tensor(True), None), "f")[::2] == (0.0, True)
    assert read_step((torch.rand(1) * 0 + 1, "x", 0), "f") == (1.0, "x", False, {})


def rows(folder: Path, *entries: Any) -> str:
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(entry if isinstance(entry, str) else json.dumps(entry) for entry in entries))
    return str(file)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> str:
    folder = tmp_path_factory.mktemp("model")
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_prompts(model: str, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "7"}]
    name = rows(tmp_path, {"q": messages, "a": "1"}, "", {"q": "8" * 50, "a": 2}, {"q": "9", "a": None}, {"q": "10"})
    problems = load_prompts(
        [name], model_path=model, input_key="q", label_key="a", apply_chat_template=True, prompt_max_len=20,
        max_samples=3,
    )  # fmt: skip
    assert [(problem["id"], problem["state"], problem["label"]) for problem in problems] == [
        ("prompts-0", "<|system|>be<|end|><|user|>7<|end|><|assistant|>", "1"),
        ("prompts-2", "<|user|>9<|end|><|assistant|>", None),
    ]
    (plain,) = load_prompts([rows(tmp_path, {"input": "as it is"})], model_path=model)
    assert (plain["state"], plain["label"], plain["dataset"]) == ("as it is", "", str(tmp_path / "prompts.jsonl"))


def test_several_data_sets_follow_one_another(model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files of 2, 1 and 2 rows of the same name: rows 1 to 4 are taken, and every id is there once."""
    names = []
    for folder, numbers in (("a", (1, 2)), ("b", (3,)), ("c", (4, 5))):
        (tmp_path / folder).mkdir()
        names.append(rows(tmp_path / folder, *({"input": str(number)} for number in numbers)))
    problems = load_prompts([*names, names[0]], model_path=model, max_samples=4)
    assert [(problem["id"], problem["state"], problem["dataset"]) for problem in problems] == [
        ("prompts-0", "1", names[0]),
        ("prompts-1", "2", names[0]),
        ("prompts.2-0", "3", names[1]),
        ("prompts.3-0", "4", names[2]),
    ]
    assert [record.message.partition(" is not used")[0] for record in caplog.records] == [names[0]]
    twice = load_prompts([names[0], names[0]], model_path=model)
    assert [problem["id"] for problem in twice] == ["prompts-0", "prompts-1", "prompts.2-0", "prompts.2-1"]


def test_data_sets_are_drawn_by_their_shares(model: str, tmp_path: Path) -> None:
    """2 and 30 rows, drawn 3 to 1: of any 4 prompts 3 are of the small file, which begins anew when it is used up."""
    names = []
    for folder, count in (("small", 2), ("large", 30)):
        (tmp_path / folder).mkdir()
        names.append(rows(tmp_path / folder, *({"input": f"{folder}{number}"} for number in range(count))))
    words = [f"agent.prompt_data='{names[0]},{names[1]}'", "agent.prompt_data_probs=0.75,0.25"]
    config = composed(tmp_path, *words, f"model_path={model}").config
    problems = load_problem_sets(config).train
    assert len(problems) == 32
    order = ProblemOrder(problems, "0")
    drawn = [order[number].data["state"] for number in range(40)]
    assert [sum(state.startswith("small") for state in drawn[at : at + 4]) for at in range(0, 40, 4)] == [3] * 10
    small = [state for state in drawn if state.startswith("small")]
    assert all({*small[at : at + 2]} == {"small0", "small1"} for at in range(0, 30, 2))
    assert len({state for state in drawn if state.startswith("large")}) == 10
    # Of 8 rows in all 6 would be of the small file.
    few = load_prompts(names, model_path=model, max_samples=8, shares=config.dataset_loader_params["shares"])
    assert [problem["dataset"] for problem in few] == [names[0]] * 2 + [names[1]] * 2
    # Held-out data has no shares.
    assert "share" not in load_prompts(names[:1], model_path=model, shares=config.dataset_loader_params["shares"])[0]


@pytest.mark.parametrize(
    ("entries", "params", "words"),
    [
        (({"input": "x"}, "{broken"), {}, "prompts.jsonl:2 is no JSON"),
        (("[1, 2]",), {}, "expected a JSON object"),
        (({"x": "y"},), {}, r"agent.input_key: got 'input', but .* row 0 has the columns \['x'\]"),
        (({"input": "y"},), {"label_key": "z"}, "agent.label_key: got 'z'"),
        (({"input": []},), {}, "agent.apply_chat_template=true"),
        (({"input": []},), {"apply_chat_template": True}, "no text and no list of messages"),
    ],
)
def test_prompts_that_cannot_be_used(
    entries: Any, params: dict[str, Any], words: str, model: str, tmp_path: Path
) -> None:
    with pytest.raises(DomainError, match=words):
        load_prompts([rows(tmp_path, *entries)], model_path=model, **params)


def test_the_function_alone_is_enough_of_a_configuration(tmp_path: Path) -> None:
    file, prompts = tmp_path / "f.py", tmp_path / "p.jsonl"
    file.touch()
    prompts.touch()
    words = [f"actor.agent_func_path={file}", f"agent.prompt_data={prompts}", "agent.input_key=q", "model_path=m"]
    config = compose(["--config-name", "agent", "output_dir=x", *words]).config
    assert config is not None
    assert (config.actor.rollout_policy, config.dataset_loader) == (AGENT_ROLLOUT, PROMPT_LOADER)
    assert config.train_dataset_names == [str(prompts)] and config.test_dataset_names == []
    assert config.dataset_loader_params["input_key"] == "q" and config.dataset_loader_params["model_path"] == "m"


def composed(folder: Path, *words: str) -> Any:
    file = folder / "f.py"
    file.touch()
    (folder / "a.jsonl").touch()
    (folder / "with,comma.jsonl").touch()
    arguments = ["--config-name", "agent", "output_dir=x", "model_path=m", f"actor.agent_func_path={file}", *words]
    return compose([argument.replace("HERE", str(folder)) for argument in arguments])


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ("HERE/a.jsonl,org/name:test", ["HERE/a.jsonl", "org/name:test"]),
        ("'HERE/a.jsonl, org/name'", ["HERE/a.jsonl", "org/name"]),
        ("[org/name,HERE/a.jsonl,org/name]", ["org/name", "HERE/a.jsonl", "org/name"]),
        ("'HERE/with,comma.jsonl'", ["HERE/with,comma.jsonl"]),
        ("org/name", ["org/name"]),
    ],
)
def test_data_sets_with_commas(value: str, names: list[str], tmp_path: Path) -> None:
    config = composed(tmp_path, f"agent.prompt_data={value}", f"agent.eval_data={value}").config
    expected = [name.replace("HERE", str(tmp_path)) for name in names]
    assert config.train_dataset_names == config.test_dataset_names == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["agent.prompt_data='a,0.3,b,0.7'"], "agent.prompt_data: got 'a,0.3,b,0.7', expected names of data sets"),
        (["agent.prompt_data=a,0.5"], r"agent.prompt_data: got \['a', 0.5\], expected names of data sets"),
        (["agent.prompt_data=a", "agent.eval_data='a,,b'"], "agent.eval_data: got 'a,,b', expected a name between"),
        (["agent.prompt_data=[]"], r"agent.prompt_data: got \[\], expected a JSONL file"),
        (["agent.prompt_data=a", "agent.prompt_data_probs='0.5,0.5'"], "got '0.5,0.5', expected 1 numbers above 0"),
        (["agent.prompt_data='a,b'", "agent.prompt_data_probs='0.5,x'"], "got '0.5,x', expected 2 numbers above 0"),
        (["agent.prompt_data='a,b'", "agent.prompt_data_probs=[0.5,0]"], r"got \[0.5, 0\], expected 2 numbers above 0"),
        (["agent.prompt_data='a,b'", "agent.prompt_data_probs=0.5"], "got 0.5, expected 2 numbers above 0"),
        (["agent.prompt_data='a,a'", "agent.prompt_data_probs='1,2'"], "expected each data set once with"),
    ],
)
def test_data_sets_that_are_refused(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        composed(tmp_path, *words)


def test_keys_that_nothing_reads_are_named(tmp_path: Path) -> None:
    def notes(*words: str) -> list[str]:
        return [note for note in compose([*words, "output_dir=x", "model_path=m"]).notes if note.startswith("agent.")]

    (tmp_path / "f.py").touch()
    assert notes("--config-name=guessing", "agent.prompt_data=a", "agent.max_samples=3") == [
        "agent.prompt_data, agent.max_samples do nothing without actor.agent_func_path"
    ]
    assert notes("agent.max_steps=3") == ["agent.max_steps does nothing without actor.agent_func_path"]
    function = ["--config-name=base", f"actor.agent_func_path={tmp_path}/f.py"]
    own = [*function, "dataset_loader=my.load", "train_dataset_names=[a]", "agent.eval_data=a", "agent.max_steps=3"]
    (note,) = notes(*own, "agent.prompt_max_len=5")
    assert note.startswith("agent.eval_data, agent.prompt_max_len do nothing with dataset_loader=my.load, which loads")
    assert notes(*function, "agent.prompt_data=a", "agent.prompt_max_len=5", "agent.max_steps=3") == []
    assert notes("--config-name=guessing") == []


def epoch_notes_of(folder: Path, num_prompts: int, *words: str) -> list[str]:
    return epoch_notes(composed(folder, "agent.prompt_data=a", *words).config, num_prompts)


def test_a_run_that_ends_before_its_epochs_says_so(tmp_path: Path) -> None:
    """100,000 prompts with 8 samples are 6250 steps of 128; the limit is 1000."""
    batch = "finetune.gradient_accumulation_passes=128"
    (note,) = epoch_notes_of(tmp_path, 100_000, batch)
    assert note.startswith(
        "finetune.max_train_steps=1000 ends the run before finetune.max_epochs=1, which takes 6250 steps"
    )
    assert epoch_notes_of(tmp_path, 16_000, batch) == []


def test_warm_up_and_evaluations_are_judged_by_the_steps_of_the_passes(tmp_path: Path) -> None:
    """160 prompts with 8 samples are 10 steps of 128."""
    batch = "finetune.gradient_accumulation_passes=128"
    (note,) = epoch_notes_of(tmp_path, 160, batch)
    assert note.startswith("finetune.num_warmup_steps=50 is not below the 10 steps that finetune.max_epochs=1 takes")
    for words in (["finetune.num_warmup_steps=9"], ["finetune.lr_scheduler_type=constant"], ["finetune.max_epochs=6"]):
        assert epoch_notes_of(tmp_path, 160, batch, *words) == []
    # The composition has said it already.
    config = composed(tmp_path, "agent.prompt_data=a", batch, "finetune.num_warmup_steps=2000")
    assert epoch_notes(config.config, 160) == [] and any("num_warmup_steps=2000" in note for note in config.notes)
    (note,) = epoch_notes_of(tmp_path, 160, batch, "finetune.num_warmup_steps=5", "eval_every_n_versions=20")
    assert note.startswith("eval_every_n_versions=20 is not below the 10 steps")


def test_passes_with_a_ring_that_drops_samples_get_a_note(tmp_path: Path) -> None:
    words = ["finetune.num_warmup_steps=0", "finetune.gradient_accumulation_passes=128"]
    (note,) = epoch_notes_of(tmp_path, 160, *words, "max_lag=null")
    assert note.startswith("finetune.max_epochs=1 with max_lag=null: samples that are dropped")
    assert epoch_notes_of(tmp_path, 160, *words) == []
    assert epoch_notes_of(tmp_path, 160, *words, "max_lag=null", "pop_old_data=false") == []


def test_steps_of_epochs() -> None:
    """12,500 prompts, 8 samples each, 192 a step: 520 whole steps and a part of one."""
    assert steps_of_epochs(12_500, 8, 1, 192) == 521
