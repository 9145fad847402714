"""Which tensors an adapter has on its way to a server, and whether they fit the server's model. Plain data: no torch.

Both ends ask: the trainer before anything is paused, and each worker before it receives. vLLM itself passes over a
layer that it does not know, and puts a matrix that is too small into a corner of its place.
"""

from __future__ import annotations

from collections.abc import Mapping

from pipelinerl.weights.manifest import Shape

#: Ends of the names: A of shape (rank, in) and B of shape (out, rank), with the scale alpha / r in B.
A_SUFFIX = ".lora_A.weight"
B_SUFFIX = ".lora_B.weight"
_MOST_NAMED = 4


def adapter_problems(checkpoint: Mapping[str, Shape] | None, sent: Mapping[str, Shape], largest_rank: int) -> list[str]:
    """Everything that is wrong with sending `sent` to a server that holds `checkpoint`, as short sentences.

    Args:
        checkpoint: names and shapes of the model that the server was started with; None if they are not known.
        sent: names and shapes of the tensors of the update.
        largest_rank: for which the server has room.
    """
    foreign = sorted(name for name in sent if not name.endswith((A_SUFFIX, B_SUFFIX)))
    layers = sorted({name.removesuffix(A_SUFFIX).removesuffix(B_SUFFIX) for name in sent} - set(foreign))
    problems = [f"{name} is no part of an adapter" for name in foreign]
    problems += [problem for layer in layers if (problem := _problem(layer, checkpoint, sent, largest_rank))]
    if not sent:
        problems.append("it has no tensors")
    if len(problems) > _MOST_NAMED:
        problems[_MOST_NAMED:] = [f"and {len(problems) - _MOST_NAMED} more"]
    return problems


def _problem(
    layer: str, checkpoint: Mapping[str, Shape] | None, sent: Mapping[str, Shape], largest_rank: int
) -> str | None:
    a, b = sent.get(f"{layer}{A_SUFFIX}"), sent.get(f"{layer}{B_SUFFIX}")
    if a is None or b is None:
        return f"{layer} has only one of A and B"
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        return f"{layer}: got shapes {list(a)} and {list(b)}, expected [rank, in] and [out, rank]"
    if a[0] > largest_rank:
        return f"{layer}: got rank {a[0]}, the server has room for {largest_rank}"
    if checkpoint is None:
        return None
    matrix = checkpoint.get(f"{layer}.weight")
    if matrix is None:
        return f"{layer} is unknown to the model"
    if tuple(matrix) != (b[0], a[1]):
        return f"{layer}: B A has shape {[b[0], a[1]]}, the model's matrix has {list(matrix)}"
    return None
