"""Where tensors lie in their buffers, and that equal updates share one layout."""

from __future__ import annotations

import pytest
import torch

from pipelinerl.weights.layout import LayoutCache

NAMES, DTYPES, SHAPES = ["a", "b", "c"], ["bfloat16", "float32", "float32"], [[3], [2, 2], []]


def test_offsets_and_sizes_worked_out_by_hand() -> None:
    """a: 6 bytes, b: 16, c: 4. A buffer is closed when it has more than 10; the seal takes 8, after a whole word."""
    first, second = LayoutCache().of(NAMES, DTYPES, SHAPES, 10).buffers
    assert ([meta.name for meta in first.metas], first.index, first.offsets) == (["a", "b"], 0, (0, 6))
    assert (first.payload_bytes, first.num_bytes) == (22, 24 + 8)
    assert ([meta.name for meta in second.metas], second.index, second.offsets) == (["c"], 1, (0,))
    assert (second.payload_bytes, second.num_bytes) == (4, 8 + 8)
    assert second.metas[0].dtype is torch.float32 and second.metas[0].shape == ()


def test_an_update_that_is_alike_has_the_same_layout_and_any_other_a_new_one() -> None:
    cache = LayoutCache()
    layout = cache.of(NAMES, DTYPES, SHAPES, 10)
    assert cache.of(list(NAMES), list(DTYPES), [list(shape) for shape in SHAPES], 10) is layout
    for other in (
        (["a", "b", "d"], DTYPES, SHAPES, 10),
        (NAMES, ["bfloat16", "float32", "bfloat16"], SHAPES, 10),
        (NAMES, DTYPES, [[3], [4], []], 10),
        (NAMES, DTYPES, SHAPES, 11),
    ):
        assert cache.of(NAMES, DTYPES, SHAPES, 10) is not cache.of(*other)


def test_a_list_that_changes_afterwards_is_another_update() -> None:
    cache, names, shapes = LayoutCache(), list(NAMES), [list(shape) for shape in SHAPES]
    layout = cache.of(names, DTYPES, shapes, 10)
    names[0] = "z"
    assert (other := cache.of(names, DTYPES, shapes, 10)) is not layout
    shapes[0][0] = 4
    assert cache.of(names, DTYPES, shapes, 10) is not other


def test_what_is_refused_is_not_kept() -> None:
    cache = LayoutCache()
    for _ in range(2):
        with pytest.raises(ValueError, match="'float33'"):
            cache.of(NAMES, ["float33", "float32", "float32"], SHAPES, 10)
