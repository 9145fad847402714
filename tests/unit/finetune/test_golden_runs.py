"""Golden runs: 20 real trainer steps on recorded samples give the committed curve of each loss of `SETTINGS`.

Tolerance 3e-5 of |a - b| / max(1, |a|, |b|). On these runs everything that only changes the order of sums (one sample a
micro-batch) or removes the rounding (fp64 throughout, tested here) moves no number by more than 3e-6. Versions of torch
differ in rounding alone, so they stay inside; a clip bound that is off by 0.01 does not (tested here).
`python tests/golden/make.py` makes the curves anew, `scripts/compare_losses.py` compares them.
"""

from __future__ import annotations

import json

import pytest
import torch
from fakes.golden_run import FOLDER, SETTINGS, STEPS, recorded_batches, train

from pipelinerl.rl.loss import POLICY_LOSSES

TOLERANCE = 3e-5


@pytest.fixture(scope="module")
def batches():
    return list(recorded_batches())


def committed(loss):
    return [json.loads(line) for line in (FOLDER / f"{loss}.jsonl").read_text().splitlines()]


def difference(left, right):
    """(size, step, name) of the largest difference of two curves."""
    assert [row["step"] for row in left] == [row["step"] for row in right]
    return max(
        (abs(a[name] - b[name]) / max(1.0, abs(a[name]), abs(b[name])), a["step"], name)
        for a, b in zip(left, right, strict=True)
        for name in ("finetune/loss", "finetune/grad_norm")
    )


@pytest.mark.parametrize("loss", sorted(SETTINGS))
def test_the_committed_curve_is_reproduced(batches, loss):
    curve = train(loss, batches)
    assert len(curve) == len(committed(loss)) == STEPS
    found = difference(committed(loss), curve)
    assert found[0] < TOLERANCE, f"{loss}: largest difference {found}"


@pytest.mark.slow
@pytest.mark.parametrize("loss", sorted(SETTINGS))
def test_rounding_stays_well_inside_the_tolerance(batches, loss):
    assert difference(committed(loss), train(loss, batches, torch.float64))[0] < TOLERANCE / 5


# A bound moved by 0.01 (a gate by 5 %), for each loss: the smallest mistake that a golden run has to see.
SHIFTED = {
    "reinforce": {"clamp": 1.51},
    "ppo": {"epsilon_high": 0.29},
    "gspo": {"epsilon_high": 0.09},
    "cispo": {"epsilon_low": 0.51},
    "decoupled_ppo": {"epsilon_high": 0.11},
    "sapo": {"soft_gate_negative": 2.1},
}


@pytest.mark.parametrize("loss", sorted(SHIFTED))
def test_a_slightly_wrong_loss_is_seen(batches, loss):
    assert difference(committed(loss), train(loss, batches, **SHIFTED[loss]))[0] > TOLERANCE


def test_losses_have_different_curves(batches):
    """No golden file is a copy of another one, and every recorded loss has its own settings."""
    assert set(SHIFTED) == set(SETTINGS) <= set(POLICY_LOSSES)
    curves = [tuple(row["finetune/loss"] for row in committed(loss)) for loss in SETTINGS]
    assert len(set(curves)) == len(curves)


def test_the_samples_are_worth_it(batches):
    """Old tokens, samples of two versions, tokens that are not trained inside an output, both signs of advantages."""
    samples = [sample for batch in batches for sample in batch.samples]
    assert [batch.step for batch in batches] == list(range(1, STEPS + 1))
    assert any(len(sample.version_spans) == 2 for sample in samples)
    assert any(-100 in sample.labels[sample.prompt_tokens :] for sample in samples)
    lags = {batch.step - 1 - sample.min_version for batch in batches for sample in batch.samples}
    assert lags >= {0, 1, 2, 3}
    advantages = [sample.advantage for batch in batches for sample in batch.samples]
    assert min(advantages) < 0 < max(advantages)
