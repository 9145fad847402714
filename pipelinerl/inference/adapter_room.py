"""The options of a server that holds a frozen base model and gets an adapter by updates. Pure: no torch, no vllm.

Called by `inference.arguments`, by the checks before a run, and by the parts of a server that ask whether it is one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipelinerl.errors import ConfigError

#: `1` in a server's environment: it holds the frozen base model, and updates bring an adapter.
ADAPTER_VARIABLE = "PIPELINERL_SERVED_ADAPTER"
#: The ranks that vLLM makes room for (`vllm/config/lora.py`, version 0.32).
ROOM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_SYNC = "finetune.lora.sync=adapter"
#: Options about adapters that leave open which one is served.
_FREE_OPTIONS = ("fully-sharded-loras",)
_EMBEDDINGS = (
    *("embed_tokens", "embed_positions", "embed_in", "embed_out", "word_embeddings", "position_embeddings"),
    *("lm_head", "wte", "wpe"),
)


@dataclass(frozen=True)
class AdapterRoom:
    """What a server keeps free for the adapter that updates bring.

    Attributes:
        rank: of the adapter.
        layers: last parts of the names of the layers that may have one, such as `q_proj`; empty: every layer, the
            embedding and the output head too.
    """

    rank: int
    layers: tuple[str, ...] = ()

    def options(self) -> dict[str, object]:
        """Options of vLLM, names with dashes. ConfigError: it has no room for this rank."""
        room = next((rank for rank in ROOM_RANKS if rank >= self.rank), None)
        if room is None or self.rank < 1:
            raise ConfigError(
                "rank of the adapter",
                self.rank,
                f"1 to {ROOM_RANKS[-1]}: vLLM has room for no other",
                "Choose another.",
            )
        options: dict[str, object] = {"enable-lora": True, "max-loras": 1, "max-lora-rank": room}
        if self.layers:
            options["lora-target-modules"] = list(self.layers)
        return options


def serves_adapter(environ: Mapping[str, str]) -> bool:
    """Whether the server of this environment holds a frozen base model and gets an adapter by updates."""
    return environ.get(ADAPTER_VARIABLE) == "1"


def layers_of(tensors: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
    """Last parts of the names of the layers of a checkpoint that multiply with a matrix, in order; no embeddings.

    Args:
        tensors: shapes by name.
    """
    layers = {
        name.split(".")[-2]: None for name, shape in tensors.items() if name.endswith(".weight") and len(shape) == 2
    }
    return tuple(layer for layer in layers if layer not in _EMBEDDINGS)


def check_options_beside(options: Mapping[str, object]) -> None:
    """Refuse options of the user that would make such a server serve something else.

    Args:
        options: by their names with dashes.

    Raises:
        ConfigError: with the option.
    """
    for name, value in options.items():
        words = set(name.partition(".")[0].split("-"))
        if not words.isdisjoint(("lora", "loras")) and name.removeprefix("no-") not in _FREE_OPTIONS:
            raise ConfigError(
                f"vllm_config.vllm_kwargs.{name}",
                value,
                f"no options about adapters with {_SYNC}: they follow from finetune.lora",
                "Remove it, or set finetune.lora.sync=merged.",
            )
