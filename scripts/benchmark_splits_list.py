"""The splits of `benchmark_splits.py`: which server and which rank has which GPU, as words for a run. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Backend = Literal["plain", "zero2", "zero3", "fsdp"]


@dataclass(frozen=True)
class Split:
    """One way to share the GPUs of a host.

    Attributes:
        servers: the GPUs of each server that samples.
        ranks: the GPU of each trainer rank; ranks may share GPUs with servers.
        reference: the GPUs of each server of the frozen reference model.
        backend: of the trainer.
        colocated: servers and ranks take turns on the GPUs that they share.
    """

    name: str
    servers: tuple[tuple[int, ...], ...]
    ranks: tuple[int, ...]
    reference: tuple[tuple[int, ...], ...] = ()
    backend: Backend = "plain"
    colocated: bool = False

    @property
    def gpus(self) -> int:
        """Number of GPUs that it needs."""
        listed = [gpu for server in (*self.servers, *self.reference) for gpu in server]
        return 1 + max([*listed, *self.ranks])

    @property
    def parallel(self) -> int:
        """Tensor parallel size of the servers."""
        return len(self.servers[0])


#: By the number of GPUs of the host; `DEFAULTS` are those that run if none is named.
SPLITS: dict[int, tuple[Split, ...]] = {
    2: (
        Split("tp2-colocated-zero3", ((0, 1),), (0, 1), backend="zero3", colocated=True),
        Split("2servers-1rank", ((0,), (0,)), (1,)),
        Split("1server-1reference-1rank", ((0,),), (1,), reference=((0,),)),
        Split("1server-2ranks-zero3-shared", ((0,),), (0, 1), backend="zero3"),
        Split("1server-2ranks-zero3-shared-nccl", ((0,),), (1, 0), backend="zero3"),
        Split("1server-2ranks-zero2-shared", ((0,),), (0, 1), backend="zero2"),
        Split("1server-2ranks-fsdp-shared", ((0,),), (0, 1), backend="fsdp"),
        Split("2servers-2ranks-colocated-zero3", ((0,), (1,)), (0, 1), backend="zero3", colocated=True),
        Split("1server-1rank", ((0,),), (1,)),
    ),
    4: (
        Split("2servers-2ranks-zero2", ((0,), (1,)), (2, 3), backend="zero2"),
        Split("2servers-2ranks-zero3", ((0,), (1,)), (2, 3), backend="zero3"),
        Split("2servers-2ranks-fsdp", ((0,), (1,)), (2, 3), backend="fsdp"),
        Split("3servers-1rank", ((0,), (1,), (2,)), (3,)),
        Split("tp2-2ranks-zero3", ((0, 1),), (2, 3), backend="zero3"),
        Split("1server-1reference-2ranks-zero3", ((0,),), (2, 3), reference=((1,),), backend="zero3"),
        Split("2xtp2-4ranks-colocated-zero3", ((0, 1), (2, 3)), (0, 1, 2, 3), backend="zero3", colocated=True),
    ),
    8: (
        Split("4servers-4ranks-zero3", ((0,), (1,), (2,), (3,)), (4, 5, 6, 7), backend="zero3"),
        Split("2xtp2-4ranks-zero3", ((0, 1), (2, 3)), (4, 5, 6, 7), backend="zero3"),
    ),
}
DEFAULTS = {2: SPLITS[2][:4], 4: SPLITS[4], 8: SPLITS[8][:1]}


def chosen(gpus: int, names: list[str] | None) -> list[Split]:
    """The splits to run on a host with `gpus` GPUs; `names` may be of smaller hosts too.

    Raises:
        ValueError: a name that is unknown or needs more GPUs.
    """
    if not names:
        return list(DEFAULTS[gpus])
    known = {split.name: split for size, splits in SPLITS.items() if size <= gpus for split in splits}
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--splits: got {', '.join(unknown)}, expected with --gpus {gpus}: {', '.join(known)}")
    return [known[name] for name in names]


def words_of(split: Split, device: str, max_lag: int | None, kv_gib: float) -> list[str]:
    """The overrides that make a run use `split` on `device`; on a CPU lists of GPUs only say how many there are."""
    precision = "fp32" if device == "cpu" else "bf16"
    words = [
        f"world.device={device}",
        f"world.actor_gpus={_listed(split.servers)}",
        f"world.finetune_gpus={_listed(split.ranks)}",
        f"use_deepspeed={str(split.backend.startswith('zero')).lower()}",
        f"use_fsdp={str(split.backend == 'fsdp').lower()}",
    ]
    if split.backend.startswith("zero"):
        words.append(f"deepspeed_config=deepspeed_stage{split.backend[-1]}_{precision}")
    if split.reference:
        words += [f"world.preprocessor_gpus={_listed(split.reference)}", "finetune.rl.kl_coef=0.01"]
    if split.parallel > 1:
        words.append(f"vllm_config.vllm_kwargs.tensor-parallel-size={split.parallel}")
    if device == "cuda":
        words.append(f"vllm_config.vllm_kwargs.kv-cache-memory-bytes={round(kv_gib * 2**30)}")
    if split.colocated:
        words += ["world.placement=colocated", "schedule=conventional", "steps_per_generation=1", "max_lag=null"]
    else:
        words.append(f"max_lag={'null' if max_lag is None else max_lag}")
    return words


def _listed(value: tuple[object, ...]) -> str:
    """A tuple as the command line writes lists: `[[0],[1]]`."""
    parts = [_listed(item) if isinstance(item, tuple) else str(item) for item in value]
    return f"[{','.join(parts)}]"
