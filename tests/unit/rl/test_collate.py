"""Collation: targets are shifted once, positions restart, padding is marked; weights by aggregation (M3)."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from rl_samples import collated, make_sample

from pipelinerl.records.sample import Array
from pipelinerl.rl.microbatch import collate, sentinel, token_weights

A = make_sample([1, 2], [3, 4], logprobs=[-0.1, -0.2], spans=[(3, 0, 1), (4, 1, 2)], advantage=2.0)
B = make_sample([5], [6], logprobs=[-0.3], sample_id="0-1/r0/s0", advantage=-1.0)


def test_m3_packed_row():
    mb = collated([A, B])
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
    assert mb.attention_mask is None and mb.ref_logprobs is None and mb.token_rewards is None
    assert (mb.num_segments, mb.step_tokens, mb.num_tokens, mb.indices) == (2, 3, 6, (0, 1))


def test_m3_padded_rows_hold_the_same_values():
    mb = collate([A, B], [0, 1], weights=token_weights([A, B]), packed=False, pad_id=9)
    assert mb.input_ids.tolist() == [[1, 2, 3, 4], [5, 6, 9, 9]]
    assert mb.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert mb.segment_ids.tolist() == [[0, 0, 0, 0], [1, 1, -1, -1]]
    assert mb.targets.tolist() == [[-100, 3, 4, -100], [6, -100, -100, -100]]
    assert mb.versions.tolist() == [[-1, 3, 4, -1], [0, -1, -1, -1]]
    assert mb.num_tokens == 6


def test_sentinel_trains_nothing():
    mb = sentinel(pad_id=0, step_tokens=7)
    assert not mb.mask.any() and not mb.weights.any() and mb.num_segments == 0
    empty = collate([A], [], weights=token_weights([A]), packed=True, pad_id=0)
    assert not empty.mask.any() and empty.step_tokens == 2


@pytest.mark.parametrize(
    "change",
    [
        {"logprobs": [-0.1]},
        {"labels": [-100, -100, 3]},
        {"labels": [1, -100, 3, -100]},
        {"version_spans": []},
        {"ref_logprobs": [-0.1]},
        {"advantage": None},
        {"multimodal": {"pixels": Array("<f4", [1], bytes(4))}},
    ],
)
def test_t2_faulty_samples_are_never_broadcast_or_filled(change):
    refs = [-0.1] * len(A.logprobs) if "ref_logprobs" in change else []
    faulty, other = replace(A, **change), replace(A, id="other", ref_logprobs=refs)
    for samples in ([faulty], [other, faulty], [faulty, other]):
        with pytest.raises(ValueError, match="sample 0-0/r0/s0"):
            collated(samples)


def test_reference_logprobs_of_all_samples_or_of_none():
    with_ref = make_sample([1], [2], ref_logprobs=[-1.0])
    assert collated([with_ref]).ref_logprobs.tolist() == [[-1.0, 0.0]]
    with pytest.raises(ValueError, match="ref_logprobs"):
        collated([with_ref, B])


def test_weights_by_aggregation():
    # Two groups: A (2 tokens) and B (1 token) with a third sample C (3 tokens) in B's group.
    samples = [A, B, make_sample([1], [2, 2, 2], sample_id="0-1/r1/s0")]
    names = ("sample", "sample_mean", "token", "group", "constant_length")
    weights = {name: token_weights(samples, name, 10) for name in names}
    assert weights["sample"] == [1 / 3] * 3
    assert weights["sample_mean"] == [1 / 6, 1 / 3, 1 / 9]
    assert weights["token"] == [1 / 6] * 3
    assert weights["group"] == [1 / 4, 1 / 8, 1 / 8]  # each group sums to 1/2: 2 * 1/4 and (1 + 3) * 1/8
    assert weights["constant_length"] == [1 / 30] * 3
