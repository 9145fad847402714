"""Collation: targets are shifted once, positions restart, padding is marked, faults inside a sample are refused."""

from __future__ import annotations

import msgspec
import pytest
import torch
from rl_samples import make_sample, scored

from pipelinerl.rl.aggregation import step_scale
from pipelinerl.rl.batch import collate, sentinel
from pipelinerl.rl.sample_check import check_sample

A = scored(make_sample([1, 2], [3, 4], logprobs=[-0.1, -0.2], spans=[(3, 0, 1), (4, 1, 2)], reward=0.5), 2.0)
B = scored(make_sample([5], [6], logprobs=[-0.3], sample_id="0-1/r0/s0"), [-1.0])


def test_m3_packed_row():
    mb = collate([A, B], [0, 1], scale=step_scale([A, B]), packed=True, pad_id=0)
    assert mb.input_ids.tolist() == [[1, 2, 3, 4, 5, 6]]
    assert mb.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    assert mb.segment_ids.tolist() == [[0, 0, 0, 0, 1, 1]]
    # Position 3 is the end of A: it must not predict 5, the start of B.
    assert mb.targets.tolist() == [[-100, 3, 4, -100, 6, -100]]
    torch.testing.assert_close(mb.old_logprobs, torch.tensor([[0, -0.1, -0.2, 0, -0.3, 0]]))
    assert mb.advantages.tolist() == [[0, 2, 2, 0, -1, 0]]
    assert mb.weights.tolist() == [[0, 0.5, 0.5, 0, 0.5, 0]]
    assert mb.versions.tolist() == [[-1, 3, 4, -1, 0, -1]]
    assert mb.oldest_versions.tolist() == [[-1, 3, 3, -1, 0, -1]]
    assert mb.trained.tolist() == [1, 2, 4]
    assert mb.attention_mask is None and mb.ref_logprobs is None
    assert mb.rewards.tolist() == [0.5, 1.0]
    assert (mb.num_segments, mb.step_tokens, mb.num_tokens) == (2, 3, 6)


def test_m3_padded_rows_hold_the_same_values():
    mb = collate([A, B], [0, 1], scale=step_scale([A, B]), packed=False, pad_id=9)
    assert mb.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 9, 9]]
    assert mb.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert mb.segment_ids.tolist() == [[0, 0, 0, 0], [1, 1, -1, -1]]
    assert mb.targets.tolist() == [[-100, 3, 4, -100], [6, -100, -100, -100]]
    assert mb.num_tokens == 6


def test_per_token_advantages():
    sample = scored(make_sample([1], [2, 3]), [0.25, -4.0])
    mb = collate([sample], [0], scale=step_scale([sample]), packed=True, pad_id=0)
    assert mb.advantages.tolist() == [[0.25, -4.0, 0]]


def test_rewards_of_tokens_stand_where_their_targets_are():
    earning = msgspec.structs.replace(A, token_rewards=[-0.5, 0.25])
    mb = collate([earning, B], [0, 1], scale=step_scale([A, B]), packed=True, pad_id=0)
    assert mb.token_rewards is not None and mb.token_rewards.tolist() == [[0, -0.5, 0.25, 0, 0, 0]]
    assert collate([earning, B], [1], scale=step_scale([A, B]), packed=True, pad_id=0).token_rewards is None
    wrong = msgspec.structs.replace(A, token_rewards=[0.5])
    with pytest.raises(ValueError, match="1 token_rewards for 2 trained tokens"):
        collate([wrong], [0], scale=step_scale([wrong]), packed=True, pad_id=0)


def test_sentinel_trains_nothing():
    mb = sentinel(pad_id=0, step_tokens=7)
    assert not mb.mask.any() and not mb.weights.any() and mb.num_segments == 0
    empty = collate([A], [], scale=step_scale([A]), packed=True, pad_id=0)
    assert not empty.mask.any() and empty.step_tokens == 2


def test_some_reference_logprobs_are_refused():
    with_ref = scored(make_sample([1], [2], ref_logprobs=[-1.0]))
    samples = [with_ref, B]
    with pytest.raises(ValueError, match="1 of 2 samples have no ref_logprobs"):
        collate(samples, [0, 1], scale=step_scale(samples), packed=True, pad_id=0)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"logprobs": [-0.1]}, "1 logprobs for 2 trained tokens"),
        ({"labels": [-100, -100, 3]}, "3 labels for 4 input_ids"),
        ({"version_spans": []}, "version_spans cover 0 of 2"),
        ({"ref_logprobs": [-0.1]}, "1 ref_logprobs for 2"),
        ({"labels": [1, -100, 3, -100]}, "the first token is marked as trained"),
    ],
)
def test_faulty_samples_are_refused(change, text):
    with pytest.raises(ValueError, match=text):
        check_sample(msgspec.structs.replace(A.sample, **change))


def test_weights_by_aggregation():
    # Two groups: A (2 tokens) and B (1 token) with a third sample C (3 tokens) in B's group.
    c = scored(make_sample([1], [2, 2, 2], sample_id="0-1/r1/s0"))
    samples = [A, B, c]
    weights = {
        name: step_scale(samples, name, 10).token_weights for name in ("sample", "sample_mean", "token", "group")
    }
    assert weights["sample"] == (1 / 3,) * 3
    assert weights["sample_mean"] == (1 / 6, 1 / 3, 1 / 9)
    assert weights["token"] == (1 / 6,) * 3
    assert weights["group"] == (1 / 4, 1 / 8, 1 / 8)  # each group sums to 1/2: 2 * 1/4 and (1 + 3) * 1/8
    assert step_scale(samples, "constant_length", 10).token_weights == (1 / 30,) * 3
    with pytest.raises(ValueError, match="constant_length_tokens"):
        step_scale(samples, "constant_length")
    with pytest.raises(ValueError, match="expected one of"):
        step_scale(samples, "mean")
