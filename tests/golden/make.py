"""Makes the golden files anew: `samples.jsonl` (20 recorded batches) and a curve `<loss>.jsonl` for each of `SETTINGS`.

    python tests/golden/make.py             curves alone, from the samples that are there
    python tests/golden/make.py --samples   samples too: a tiny model trains with `reinforce` and samples its own data

Samples come from weights up to three versions old, some from two versions, some with tokens of a "tool" that are not
trained. Curves change only if the mathematics of the trainer change: say why in the commit.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
from pathlib import Path

import msgspec
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from fakes.golden_run import (
    FOLDER,
    SAMPLES,
    SETTINGS,
    STEPS,
    VOCABULARY,
    GoldenTrainer,
    golden_config,
    recorded_batches,
    train,
)
from fakes.short_sample import encode

from pipelinerl.config.algorithm import RLConfig
from pipelinerl.records import IGNORED_LABEL, Sample, TrainingBatch, VersionSpan
from pipelinerl.rl.advantages import score_group
from pipelinerl.rl.packing import make_plan

GROUPS, ATTEMPTS, MAX_TOKENS, END = 2, 3, 12, 1
TOOL_TOKENS = (2, 3)


@torch.no_grad()
def next_token(model: torch.nn.Module, ids: list[int], draw: random.Random) -> tuple[int, float]:
    """A sampled token and its log-prob."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
    logprobs = logits.double().log_softmax(-1)
    token = draw.choices(range(VOCABULARY), weights=logprobs.exp().tolist())[0]
    return token, round(float(logprobs[token]), 6)


def record_sample(models: list[torch.nn.Module], step: int, group: int, attempt: int) -> Sample:
    """One rollout for `step`. Its reward is the share of even tokens."""
    draw = random.Random(f"{step}/{group}/{attempt}")
    prompt_draw = random.Random(f"{step}/{group}")
    ids = [prompt_draw.randrange(4, VOCABULARY) for _ in range(prompt_draw.randint(3, 6))]
    prompt = len(ids)
    labels, logprobs, versions = [IGNORED_LABEL] * prompt, [], []
    oldest = max(0, step - 1 - draw.randrange(4))
    newer_from = draw.randint(2, 10) if draw.random() < 0.4 else MAX_TOKENS
    while len(logprobs) < MAX_TOKENS:
        version = min(oldest + (len(logprobs) >= newer_from), step - 1)
        token, logprob = next_token(models[version], ids, draw)
        ids.append(token)
        labels.append(token)
        logprobs.append(logprob)
        versions.append(version)
        if token == END:
            break
        if len(logprobs) == 3 and attempt == 2:
            ids.extend(TOOL_TOKENS)
            labels.extend([IGNORED_LABEL] * len(TOOL_TOKENS))
    spans = [
        VersionSpan(version, versions.index(version), versions.index(version) + versions.count(version))
        for version in sorted(set(versions))
    ]
    trained = [label for label in labels if label != IGNORED_LABEL]
    return Sample(
        id=f"{step}-{group}/r{attempt}/s0",
        group_id=f"{step}-{group}",
        rollout_id=f"{step}-{group}/r{attempt}",
        input_ids=ids,
        labels=labels,
        logprobs=logprobs,
        reward=round(sum(token % 2 == 0 for token in trained) / len(trained), 4),
        finished=trained[-1] == END,
        finish_reason="stop" if trained[-1] == END else "length",
        prompt_tokens=prompt,
        output_tokens=len(trained),
        version_spans=spans,
    )


def record_batch(models: list[torch.nn.Module], step: int) -> TrainingBatch:
    scored: list[Sample] = []
    for group in range(GROUPS):
        samples = [record_sample(models, step, group, attempt) for attempt in range(ATTEMPTS)]
        for item in score_group(samples, [], RLConfig()):
            scored.append(msgspec.structs.replace(item, advantage=round(item.advantage, 6)))
    return TrainingBatch(
        id=f"0-{step}",
        step=step,
        samples=scored,
        group_ids=[f"{step}-{group}" for group in range(GROUPS)],
        plan=make_plan([len(item.input_ids) for item in scored], 1, 64, True),
        actor_offset=step * GROUPS,
    )


def record_samples() -> None:
    """Train with the default loss and keep what was trained on."""
    trainer = GoldenTrainer(golden_config("reinforce", clamp=5.0))
    models = [copy.deepcopy(trainer.policy.language_model)]
    lines = []
    for step in range(1, STEPS + 1):
        batch = record_batch(models, step)
        lines.append(encode(batch) + b"\n")
        trainer.step(batch)
        models.append(copy.deepcopy(trainer.policy.language_model))
    SAMPLES.write_bytes(b"".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", action="store_true", help="record the samples anew too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.samples:
        record_samples()
    batches = list(recorded_batches())
    for loss in sorted(SETTINGS):
        rows = [json.dumps(row) + "\n" for row in train(loss, batches)]
        (FOLDER / f"{loss}.jsonl").write_text("".join(rows))


if __name__ == "__main__":
    main()
