"""The last 8 bytes of a packed buffer prove to the receiver that these are the bytes of this buffer of this pass.

Called by `packing.pack` on the trainer's side and `receiving.receive_buffers` in a server. A broadcast can end without
an error and leave zeros, or what an earlier update left in the memory; only the content can tell.

The seal is an exact sum over the payload as 8-byte words plus a mark of (pass, buffer). Integer addition wraps and does
not depend on the order, so a CPU and a GPU get the same number. All work stays on the buffer's device.
"""

from __future__ import annotations

import torch

SEAL_BYTES = 8
_WORD_BYTES = 8
#: Words that share a factor in the sum; blocks have different ones, so that exchanged blocks are found as well.
BLOCK_WORDS = 4096
_INDEX_STEP = 2**40


def sealed_bytes(payload_bytes: int) -> int:
    """Size of a buffer with its payload, the zero bytes up to a whole word, and the seal."""
    return -(-payload_bytes // _WORD_BYTES) * _WORD_BYTES + SEAL_BYTES


def mark_of(pass_id: int, index: int, payload_bytes: int) -> int:
    """What the seal of a buffer has beside the sum, as a signed 64-bit number. Odd, so never 0: all zeros never pass.

    Args:
        pass_id: random number below 2**63, another one for every pass over the weights.
        index: number of the buffer in its pass, from 0.
        payload_bytes: its bytes without padding and seal.
    """
    mark = (2 * (pass_id + index * _INDEX_STEP + payload_bytes) + 1) % 2**64
    return mark - 2**64 if mark >= 2**63 else mark


def checksum(words: torch.Tensor) -> torch.Tensor:
    """Sum of `words` (int64, one dimension) modulo 2**64, each times the factor of its block: 1, 3, 5, ... A scalar.

    The factors are odd, so that any change of one word changes the sum.
    """
    whole = words.numel() // BLOCK_WORDS
    blocks = words[: whole * BLOCK_WORDS].view(whole, BLOCK_WORDS).sum(dim=1)
    factors = torch.arange(whole, device=words.device) * 2 + 1
    return (blocks * factors).sum() + words[whole * BLOCK_WORDS :].sum() * (2 * whole + 1)


def write_seal(buffer: torch.Tensor, mark: int) -> None:
    """Put the seal at the end of `buffer` (uint8, `sealed_bytes` long). Does not wait for the device."""
    words = buffer.view(torch.int64)
    words[-1:].copy_(checksum(words[:-1]) + mark)


def seal_problem(buffer: torch.Tensor, num_bytes: int, mark: int) -> str | None:
    """Why `buffer` is not what was sealed with `mark`; None if it is. Waits for the device once.

    Args:
        buffer: uint8, on any device.
        num_bytes: what it should have, padding and seal included.
    """
    if buffer.numel() != num_bytes:
        return f"{buffer.numel()} bytes, expected {num_bytes}"
    words = buffer.view(torch.int64)
    got, seal = torch.stack((checksum(words[:-1]), words[-1])).tolist()
    # The sum that the sender had, if this seal is of this buffer and pass.
    expected = (seal - mark + 2**63) % 2**64 - 2**63
    if got == expected:
        return None
    zeros = " (all zeros)" if got == seal == 0 and not bool(buffer.any()) else ""
    return f"checksum {got}, expected {expected}{zeros}"
