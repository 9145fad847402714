"""What an adapter has to look like to be sent to a server."""

import pytest

from pipelinerl.weights.adapter_manifest import adapter_problems

MODEL = {"model.layers.0.q_proj.weight": (6, 4), "model.layers.0.down_proj.weight": (4, 8), "model.norm.weight": (4,)}
FITTING = {
    "model.layers.0.q_proj.lora_A.weight": (2, 4),
    "model.layers.0.q_proj.lora_B.weight": (6, 2),
    "model.layers.0.down_proj.lora_A.weight": (2, 8),
    "model.layers.0.down_proj.lora_B.weight": (4, 2),
}


def test_an_adapter_of_some_layers_fits():
    assert adapter_problems(MODEL, FITTING, 2) == []
    assert adapter_problems(None, FITTING, 8) == []
    only_q = {name: shape for name, shape in FITTING.items() if ".q_proj." in name}
    assert adapter_problems(MODEL, only_q, 2) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model.norm.weight": (4,)}, "model.norm.weight is no part of an adapter"),
        ({"model.layers.0.q_proj.lora_B.weight": None}, "model.layers.0.q_proj has only one of A and B"),
        (
            {"model.layers.0.q_proj.lora_B.weight": (6, 1)},
            "model.layers.0.q_proj: got shapes [2, 4] and [6, 1], expected [rank, in] and [out, rank]",
        ),
        (
            {"model.layers.0.q_proj.lora_B.weight": (5, 2)},
            "model.layers.0.q_proj: B A has shape [5, 4], the model's matrix has [6, 4]",
        ),
        (
            {"model.layers.9.q_proj.lora_A.weight": (2, 4), "model.layers.9.q_proj.lora_B.weight": (6, 2)},
            "model.layers.9.q_proj is unknown to the model",
        ),
        (
            {"model.layers.0.q_proj.lora_A.weight": (3, 4), "model.layers.0.q_proj.lora_B.weight": (6, 3)},
            "model.layers.0.q_proj: got rank 3, the server has room for 2",
        ),
    ],
)
def test_what_does_not_fit_is_named(change, problem):
    sent = {name: shape for name, shape in {**FITTING, **change}.items() if shape is not None}
    assert adapter_problems(MODEL, sent, 2) == [problem]


def test_nothing_is_no_adapter_and_many_problems_are_counted():
    assert adapter_problems(MODEL, {}, 2) == ["it has no tensors"]
    many = {f"model.layers.{n}.q_proj.bias": (6,) for n in range(9)}
    assert adapter_problems(MODEL, many, 2)[-1] == "and 5 more"
