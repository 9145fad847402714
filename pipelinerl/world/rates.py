"""Seconds of a step and tokens per second of servers and trainer: a roofline, corrected by what was measured.

Trainer: 6 FLOPs a value and token (8 with checkpointing, which computes the forward pass twice), attention and the
head's logits apart (Kaplan et al. 2020, arXiv 2001.08361, section 2.1), at a share of the card's peak; a micro-batch
takes at least the time in which the host starts its kernels. The optimizer reads and writes its state at a share of the
memory bandwidth. Servers: a decoding step reads the weights and the cache once (Pope et al. 2022, arXiv 2211.05102,
section 2), multiplies, and costs the host a time for each sequence; with small models the host's is the larger part.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pipelinerl.world.forecast import GIB, ServerSetup, TrainerSetup

_TERA = 1e12


class CardKind(NamedTuple):
    """Data sheet of a GPU: memory as the driver reports it, dense bf16 FLOP/s, bytes/s of its memory."""

    memory_gib: float
    flops: float
    bandwidth: float


#: NVIDIA's data sheets. Found in the driver's name of a card by the first key that it contains.
CARDS = {
    "b200": CardKind(178.4, 2250 * _TERA, 8.0 * _TERA),
    "gh200": CardKind(95.6, 989 * _TERA, 4.0 * _TERA),
    "h200": CardKind(139.8, 989 * _TERA, 4.8 * _TERA),
    "h100 pcie": CardKind(79.6, 756 * _TERA, 2.0 * _TERA),
    "h100": CardKind(79.6, 989 * _TERA, 3.35 * _TERA),
    "h800": CardKind(79.6, 989 * _TERA, 3.35 * _TERA),
    "h20": CardKind(95.6, 148 * _TERA, 4.0 * _TERA),
    "a100-40": CardKind(39.4, 312 * _TERA, 1.56 * _TERA),
    "a100": CardKind(79.2, 312 * _TERA, 2.0 * _TERA),
    "a800": CardKind(79.2, 312 * _TERA, 2.0 * _TERA),
    "l40s": CardKind(44.4, 362 * _TERA, 0.86 * _TERA),
    "a6000": CardKind(47.5, 155 * _TERA, 0.77 * _TERA),
    "a10g": CardKind(22.1, 70 * _TERA, 0.6 * _TERA),
    "a10": CardKind(22.1, 125 * _TERA, 0.6 * _TERA),
    "l4": CardKind(22.1, 121 * _TERA, 0.3 * _TERA),
    "5090": CardKind(31.4, 209 * _TERA, 1.79 * _TERA),
    "4090": CardKind(23.5, 165 * _TERA, 1.01 * _TERA),
    "3090": CardKind(23.5, 71 * _TERA, 0.94 * _TERA),
}
#: A card of another kind: an A100's speed for want of anything better.
UNKNOWN_CARD = CARDS["a100"]
#: One core of a server CPU with AVX2 or AVX-512, in fp32, as PyTorch's products of small models reach it.
_CPU_CORE_FLOPS, _CPU_BANDWIDTH = 20e9, 15e9

# What was measured, and where (docs/benchmarks.md has the table of each).
#: Share of the peak that products of the trainer reach once the card is full.
_TRAINER_SHARE = 0.35
#: Seconds in which the host starts the kernels of one layer, forward and backward.
_HOST_S_PER_LAYER = 0.0040
#: Share of the memory bandwidth that optimizer and decoding reach.
_BANDWIDTH_SHARE = 0.7
#: Share of the peak in prompts and large decoding batches.
_SERVER_SHARE = 0.5
#: Seconds of the engine process for a step, and for each sequence of it: uneven answers whose requests come and go (one
#: H200, 135 M: 40 ms with 512 requests, 16 to 23 ms with 256), and on a CPU (0.6 M: 8 ms with 64).
_HOST_S_PER_STEP, _HOST_S_PER_TOKEN = 5e-3, 68e-6
_CPU_HOST_S_PER_STEP, _CPU_HOST_S_PER_TOKEN = 2e-3, 95e-6
#: Where several processes compute on one card at once (one H200, 135 M): four servers beside a trainer make it 2.9
#: times as slow and get about half of their tokens; one server does not matter. By each server beyond the first.
_TRAINER_SLOWED, _SERVERS_SLOWED = 0.63, 0.3
#: Sizes (billions of parameters) between which trainer and servers were measured on the cards below.
_MEASURED_BILLIONS = (0.1, 3.5)
_MEASURED_CARDS = ("h100", "h200")


@dataclass(frozen=True)
class Machine:
    """What a job computes on: a kind of card, or so many cores."""

    name: str
    memory_bytes: float
    flops: float
    bandwidth: float
    on_cpu: bool = False


def cpu_machine(memory_bytes: float, cores: int) -> Machine:
    return Machine(f"{cores} CPU cores", memory_bytes, cores * _CPU_CORE_FLOPS, _CPU_BANDWIDTH, on_cpu=True)


def card_machine(name: str, memory_bytes: float | None = None) -> Machine:
    """A card by its name (the driver's, or a key of `CARDS`); `memory_bytes`: None: that of its data sheet."""
    kind = next((kind for key, kind in CARDS.items() if key in name.lower()), UNKNOWN_CARD)
    return Machine(name, memory_bytes or kind.memory_gib * GIB, kind.flops, kind.bandwidth)


@dataclass(frozen=True)
class Work:
    """What an optimizer step is made of, on average."""

    samples: int
    prompt_tokens: float
    output_tokens: float
    #: Rollouts in progress at one server at most.
    concurrency: int

    @property
    def length(self) -> float:
        return self.prompt_tokens + self.output_tokens

    @property
    def tokens(self) -> float:
        return self.samples * self.length


def train_seconds(setup: TrainerSetup, work: Work, machine: Machine) -> float:
    """Seconds of the trainer's part of a step: micro-batches and optimizer, on `setup.ranks` ranks."""
    shape = setup.shape
    passes = 4 if setup.checkpointing else 3  # a backward pass costs two forward passes
    if setup.lora_rank:
        passes -= 1  # frozen matrices need no gradient of their own
    attention = 2 * shape.layers * shape.heads * shape.head_dim * work.length  # causal: half of 4
    # The head computes its logits once more in the backward pass, for tokens that were sampled.
    head = 8 * shape.embedding * work.output_tokens / max(work.length, 1)
    flops = work.tokens * (passes * (2 * shape.active_matrices + attention) + head)
    peak = machine.flops * (1 if machine.on_cpu else _TRAINER_SHARE)
    if setup.products != "bf16" and not machine.on_cpu:
        peak /= 2.2 if setup.products == "tf32" else 15
    micro_batches = max(1.0, work.tokens / max(setup.pack_tokens, 1) / setup.ranks)
    host = 0.0 if machine.on_cpu else micro_batches * shape.layers * _HOST_S_PER_LAYER * passes / 3
    states = 32 * setup.trained / (setup.ranks if setup.sharding != "plain" else 1)
    optimizer = states / (machine.bandwidth * _BANDWIDTH_SHARE)
    if setup.optimizer_on_host:
        optimizer = states / 20e9 + 6 * setup.trained / setup.ranks / 20e9
    # Gradients (and gathered weights) travel between ranks.
    travel = 0.0
    if setup.ranks > 1 and not machine.on_cpu:
        rounds = micro_batches * 3 if setup.sharding in ("fsdp", "zero3") else 2
        travel = rounds * 2 * setup.trained / 150e9
    return max(flops / setup.ranks / peak, host) + optimizer + travel


def server_rate(setup: ServerSetup, work: Work, machine: Machine, on_card: int = 1) -> float:
    """Output tokens per second of one server with `work.concurrency` sequences, of `on_card` servers on its card."""
    shape, count = setup.shape, max(1, min(work.concurrency, setup.max_sequences))
    length = work.prompt_tokens + work.output_tokens / 2
    values = shape.active_matrices + shape.embedding
    reads = setup.weight_bytes * values + count * length * shape.kv_bytes(setup.kv_bytes)
    # Prompts are computed once for the tokens of an answer (or less: groups share them).
    prompt = work.prompt_tokens / max(work.output_tokens, 1) / 2
    flops = 2 * count * (values + prompt * shape.active_matrices)
    share = 1.0 if machine.on_cpu else _SERVER_SHARE
    bandwidth = machine.bandwidth * (1 if machine.on_cpu else _BANDWIDTH_SHARE)
    device = max(reads / bandwidth, flops / (machine.flops * share)) / setup.gpus
    host = _HOST_S_PER_STEP + count * _HOST_S_PER_TOKEN
    if machine.on_cpu:
        host = _CPU_HOST_S_PER_STEP + count * _CPU_HOST_S_PER_TOKEN
    # Hosts work side by side, their steps on the card one after the other.
    return count / max(device + host, device * on_card)


@dataclass(frozen=True)
class StepForecast:
    """Seconds of one optimizer step by part.

    Attributes:
        generate_s: in which all servers sample the tokens of a step.
        train_s: of the trainer's part.
        step_s: of the whole.
        lag: mean versions between sampling and training a token.
    """

    generate_s: float
    train_s: float
    step_s: float
    lag: float
    server_tokens_s: float
    trainer_tokens_s: float
    samples_s: float
    is_measured: bool

    @property
    def waits(self) -> str:
        """Which side waits, and how long a step."""
        if self.step_s > 0.999 * (self.generate_s + self.train_s):
            return f"they take turns: {self.generate_s:.2f} s of sampling, {self.train_s:.2f} s of training"
        if self.generate_s > self.train_s:
            return f"the trainer waits {self.generate_s - self.train_s:.2f} s of each step for samples"
        factor = self.train_s / max(self.generate_s, 1e-9)
        return f"the trainer is the limit: the servers could be {factor:.1f} times as slow"


@dataclass(frozen=True)
class Layout:
    """How servers and trainer share the cards, and time.

    Attributes:
        servers: in all; `on_card` of them on each of their cards, beside the trainer if `shared`.
        turns: servers and trainer take turns.
        ahead: batches under way at most while the trainer is the slower side, the one in training included.
    """

    servers: int
    on_card: int = 1
    shared: bool = False
    turns: bool = False
    ahead: float = 2.0


def step_forecast(
    trainer: TrainerSetup, server: ServerSetup, layout: Layout, work: Work, machine: Machine
) -> StepForecast:
    """One optimizer step.

    Lag: where the servers are slower, the tokens of a batch are on average half as old as their sequences take
    (Little's law: sequences in progress over sequences a step), and wait half a step for the rest of their batch. Where
    the trainer is slower, all batches but the one in training are older than its version.
    """
    train_s = train_seconds(trainer, work, machine)
    rate = layout.servers * server_rate(server, work, machine, layout.on_card)
    if layout.shared and not layout.turns:
        others = layout.on_card - 1
        rate /= 1 + _SERVERS_SLOWED * others
        train_s *= 1 + _TRAINER_SLOWED * others
    generate_s = work.samples * work.output_tokens / max(rate, 1e-9)
    step_s = generate_s + train_s if layout.turns else max(generate_s, train_s)
    in_progress = min(layout.servers * work.concurrency / max(work.samples, 1), layout.ahead)
    lag = in_progress / 2 + 0.5 if generate_s > train_s else max(0.0, layout.ahead - 1)
    billions = trainer.shape.parameters / 1e9
    known = any(key in machine.name.lower() for key in _MEASURED_CARDS) and trainer.sharding == "plain"
    return StepForecast(
        generate_s=generate_s,
        train_s=train_s,
        step_s=step_s,
        lag=0.0 if layout.turns else lag,
        server_tokens_s=rate,
        trainer_tokens_s=work.tokens / max(train_s, 1e-9),
        samples_s=work.samples / max(step_s, 1e-9),
        is_measured=known and _MEASURED_BILLIONS[0] <= billions <= _MEASURED_BILLIONS[1],
    )
