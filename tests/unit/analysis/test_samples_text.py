"""Turns, masks, hostile text and limits: what is shown of one rollout."""

from __future__ import annotations

import json
import re
import unicodedata
from pathlib import Path

import pytest
from fakes.recorded_run import RecordedRun

from pipelinerl.analysis.sample_view import json_lines, record_of, render
from pipelinerl.analysis.select import StoredGroup, StoredRollout, rollout_of
from pipelinerl.streams.open_run import find_run
from pipelinerl.tracking.token_text import TokenText, escaped, one_line, shortened, token_text

TOOL_CHAT = [
    ("<|user|>what is 6*7?<|end|><|assistant|>", False),
    ("call(6*7)<|end|>", True),
    ("<|tool|>42<|end|><|assistant|>", False),
    ("it is 42<|end|>", True),
]


def _token_text(root: Path) -> tuple[TokenText | None, str]:
    run = find_run(root)
    return token_text(run.config, run.run_dir)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return RecordedRun(tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def decoder(run: RecordedRun) -> TokenText:
    found, reason = _token_text(run.root)
    assert found is not None and reason == ""
    return found


def stored(run: RecordedRun, *samples: object, name: str = "0-0/r0", **fields: object) -> StoredRollout:
    import msgspec

    group = run.group("0-0", samples, **fields)  # type: ignore[arg-type]
    return rollout_of(msgspec.json.decode(msgspec.json.encode(group), type=StoredGroup), name)


def test_a_conversation_with_a_tool_is_shown_turn_by_turn(run: RecordedRun, decoder: TokenText) -> None:
    sample = run.sample("0-0/r0/s0", TOOL_CHAT, [3, 4], reward=1.0, metadata={"turns": 2})
    text = render(record_of(stored(run, sample), decoder, {"0-0/r0/s0": "trained in step 5"}, 0))
    counts = [len(run.ids(part)) for part, _ in TOOL_CHAT]
    assert text.splitlines() == [
        "rollout 0-0/r0: data set train, group 0-0, problem p-0-0",
        "  reward 1, success, 1.5 s",
        "  metrics: no_answer 0",
        f"  sample 0-0/r0/s0: reward 1, versions 3..4, {counts[0]} prompt + {counts[1] + counts[3]} output tokens, "
        "trained in step 5",
        "  finish reason stop",
        '  metadata: {"turns": 2}',
        f"  prompt ({counts[0]} tokens)",
        "  | <|user|>what is 6*7?<|end|><|assistant|>",
        f"  generated ({counts[1]} tokens, version 3)",
        "  > call(6*7)<|end|>",
        f"  context, not trained ({counts[2]} tokens)",
        "  | <|tool|>42<|end|><|assistant|>",
        f"  generated ({counts[3]} tokens, version 4)",
        "  > it is 42<|end|>",
    ]


def test_masked_truncated_and_removed_tokens_are_said(run: RecordedRun, decoder: TokenText) -> None:
    parts = [("<|user|>a<|end|>", False), ("masked", False), ("cut o", True)]
    masked = len(run.ids("masked"))
    sample = run.sample("0-0/r0/s0", parts, finished=False, finish_reason="length", output_tokens=masked + 5)
    text = render(record_of(stored(run, sample), decoder, {}, 0))
    assert "finish reason length, TRUNCATED: " in text
    assert f"MASKED: {masked} of its output tokens are not trained" in text
    assert "pending" in text
    without = StoredRollout(
        group=stored(run, sample).group,
        rollout_id="0-0/r0",
        summary=None,
        samples=[
            type(each)(**{**_fields(each), "input_ids": [], "labels": []}) for each in stored(run, sample).samples
        ],
    )
    text = render(record_of(without, decoder, {}, 0))
    assert "its tokens were removed (streams.retention=heads)" in text and "\n  |" not in text


def _fields(struct: object) -> dict[str, object]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}  # type: ignore[attr-defined]


HOSTILE = (
    "a\x1b[2J\x1b]0;owned\x07\r\x08\x9b31m\u202eevil\u2028x\u200b\ufeff\x7f\x00\x0b\x0c\x85end\nrollout 0-9/r9: fake"
)


def test_a_text_cannot_drive_the_terminal_or_look_like_ours(run: RecordedRun, decoder: TokenText) -> None:
    sample = run.sample(
        "0-0/r0/s0",
        [(HOSTILE, False), (HOSTILE, True)],
        finish_reason=HOSTILE,
        metadata={HOSTILE: [HOSTILE]},
    )
    rollout = stored(run, sample, dataset=HOSTILE, problem_id=HOSTILE)
    assert rollout.summary is not None
    rollout.summary.metrics[HOSTILE] = 1.0
    view = record_of(rollout, decoder, {"0-0/r0/s0": HOSTILE}, 0)
    assert "".join(turn["text"] for turn in view["samples"][0]["turns"]) == HOSTILE * 2
    text = render(view)
    assert not [each for each in text if each != "\n" and unicodedata.category(each) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    assert len([line for line in text.splitlines() if line.startswith("rollout")]) == 1
    assert "  | rollout 0-9/r9: fake" in text and "  > rollout 0-9/r9: fake" in text
    assert r"a\x1b[2J\x1b]0;owned\x07\r\x08\x9b31m\u202eevil\u2028x\u200b\ufeff\x7f\x00\x0b\x0c\x85end" in text
    (line,) = json_lines(view)
    assert all(" " <= each <= "~" for each in line)
    assert json.loads(line)["text"] == HOSTILE * 2


def test_words_of_every_script_stay_as_they_are() -> None:
    for text in (
        "naïve 日本語 हिन्दी",
        "\u05e9\u05dc",
        "\u0645\u06cc\u200c\u062e\u0648",
        "👩\u200d💻 ok",
        "a\tb\u00a0c\u3000d",
        "x\ny",
    ):
        assert escaped(text) == text
    assert one_line("a\nb\\n") == "a\\nb\\n"
    assert escaped("\ud800\U000e0041\u00ad") == "\\ud800\\U000e0041\\xad"


def test_emphasis_is_only_for_terminals(run: RecordedRun, decoder: TokenText) -> None:
    view = record_of(stored(run, run.sample("0-0/r0/s0", TOOL_CHAT)), decoder, {}, 0)
    colored = render(view, has_colors=True)
    assert "\x1b[2m  | <|tool|>42" in colored and "\x1b[0m" in colored
    assert "\x1b[2m  > " not in colored
    assert re.sub(r"\x1b\[\dm", "", colored) == render(view)


def test_long_texts_lose_their_middle_and_say_how_much(run: RecordedRun, decoder: TokenText) -> None:
    assert shortened("abcdefg", 4) == ("ab...(3 characters cut)...fg", 3)
    assert shortened("abcdefg", 1) == ("a...(6 characters cut)...", 6)
    assert shortened("abc", 3) == shortened("abc", 0) == ("abc", 0)
    long = "start " + "x" * 5000 + " end"
    view = record_of(stored(run, run.sample("0-0/r0/s0", [("q", False), (long, True)])), decoder, {}, 100)
    lines = render(view).splitlines()
    assert lines[-2].startswith("  > start xxx") and lines[-2].endswith("x end")
    assert str(len(long) - 100) in lines[-1]
    turn = json.loads(json_lines(view)[0])["turns"][1]
    assert turn["cut_chars"] == len(long) - 100
    huge = record_of(stored(run, run.sample("0-0/r0/s0", TOOL_CHAT, metadata={"x": "y" * 9999})), decoder, {}, 0)
    assert max(map(len, render(huge).splitlines())) < 2200


def test_json_holds_what_the_record_holds(run: RecordedRun, decoder: TokenText) -> None:
    sample = run.sample("0-0/r0/s0", TOOL_CHAT, [3, 5], reward=0.5, metadata={"judge": "ok"})
    other = run.sample("0-0/r0/s1", [("q", False), ("a", True)], reward=0.25)
    lines = json_lines(record_of(stored(run, sample, other), decoder, {"0-0/r0/s0": "filtered: x"}, 0))
    first, second = map(json.loads, lines)
    assert first["sample_id"] == "0-0/r0/s0" and second["sample_id"] == "0-0/r0/s1"
    assert first["group_id"] == "0-0" and first["rollout_id"] == "0-0/r0" and first["problem_id"] == "p-0-0"
    assert (first["reward"], first["rollout_reward"], first["success"]) == (0.5, 0.75, True)
    assert (first["first_version"], first["last_version"], first["fate"]) == (3, 5, "filtered: x")
    assert first["metadata"] == {"judge": "ok"} and first["metrics"] == {"no_answer": 0.0}
    assert [turn["kind"] for turn in first["turns"]] == ["prompt", "generated", "context", "generated"]
    assert [token for turn in first["turns"] for token in turn["token_ids"]] == sample.input_ids
    trained = [token for turn in first["turns"] if turn["trained"] for token in turn["token_ids"]]
    assert trained == [label for label in sample.labels if label != -100]
    assert first["text"] == "".join(text for text, _ in TOOL_CHAT)


def test_a_rollout_without_samples_is_render(run: RecordedRun, decoder: TokenText) -> None:
    rollout = stored(run, run.sample("0-0/r0/s0", TOOL_CHAT))
    empty = record_of(StoredRollout(group=rollout.group, rollout_id="0-0/r1", summary=None, samples=[]), decoder, {}, 0)
    assert "no samples" in render(empty)
    assert json.loads(json_lines(empty)[0])["sample_id"] is None


def test_unknown_ids_and_split_characters_are_render(run: RecordedRun, decoder: TokenText) -> None:
    ids = run.ids("ab")
    assert decoder.whole([*ids, 10**6, -5, 2**40, *ids]) == "ab<|id 1000000|><|id -5|><|id 1099511627776|>ab"
    euro = run.ids("€")
    assert len(euro) == 3
    assert decoder.part(euro, 0, 3) == "€"
    parts = [decoder.part([*ids, *euro, *ids], start, end) for start, end in ((0, 3), (3, 7))]
    assert all("\ufffd" in part for part in parts) and parts[0].startswith("ab") and parts[1].endswith("ab")


def test_a_word_within_a_text_keeps_its_space() -> None:
    """As SentencePiece tokenizers do, the first space of what is decoded is left out."""
    words = [" one", " two", " three"]
    decoder = TokenText(lambda ids: "".join(words[index] for index in ids)[1:], lambda index: True)
    assert [decoder.part([0, 1, 2], n, n + 1) for n in range(3)] == ["one", " two", " three"]


@pytest.mark.parametrize(
    "break_it",
    [
        lambda model: [file.unlink() for file in model.iterdir()],
        lambda model: (model / "tokenizer.json").write_text("{ not json \x1b[2J"),
    ],
)
def test_without_a_tokenizer_there_is_one_line_that_says_why(tmp_path: Path, break_it: object) -> None:
    run = RecordedRun(tmp_path)
    break_it(run.model)  # type: ignore[operator]
    decoder, reason = _token_text(run.root)
    assert decoder is None and str(run.model) in reason and "\n" not in reason and "\x1b" not in reason
    view = record_of(stored(run, run.sample("0-0/r0/s0", TOOL_CHAT, metadata={"note": "seen"})), None, {}, 0)
    text = render(view)
    assert f"generated ({len(run.ids('call(6*7)<|end|>'))} tokens, version 0)" in text
    assert 'metadata: {"note": "seen"}' in text and "\n  >" not in text
    assert json.loads(json_lines(view)[0])["text"] is None


def test_the_run_s_own_model_has_the_tokenizer_if_the_first_one_is_gone(tmp_path: Path) -> None:
    run = RecordedRun(tmp_path)
    run.model.rename(tmp_path / "moved")
    run.tokenizer.save_pretrained(run.files.current_model)
    decoder, _ = _token_text(run.root)
    assert decoder is not None and decoder.whole(run.ids("hello")) == "hello"


def test_a_name_is_looked_up_in_the_cache_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RecordedRun(tmp_path, model_path="org/name")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    decoder, reason = _token_text(run.root)
    assert decoder is None and "org/name: neither a folder here nor a model in the Hugging Face cache" in reason
    cached = tmp_path / "hub" / "models--org--name"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    run.tokenizer.save_pretrained(cached / "snapshots" / "abc")
    decoder, _ = _token_text(run.root)
    assert decoder is not None and decoder.whole(run.ids("hello")) == "hello"


def test_a_tokenizer_without_a_fast_file_is_loaded_as_the_run_does(tmp_path: Path) -> None:
    from transformers import ByT5Tokenizer

    run = RecordedRun(tmp_path, model_path=str(tmp_path / "bytes"))
    tokenizer = ByT5Tokenizer()
    tokenizer.save_pretrained(tmp_path / "bytes")
    decoder, _ = _token_text(run.root)
    ids = tokenizer("hé").input_ids
    assert decoder is not None and decoder.whole([*ids, 9999]) == "hé</s><|id 9999|>"
