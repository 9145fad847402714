"""Seconds of a step and tokens per second of servers and trainer: a roofline, corrected by what was measured.

Trainer: 6 FLOPs a value and token (8 with checkpointing, which computes the forward pass twice), attention and the
head's logits apart (Kaplan et al. 2020, arXiv 2001.08361, section 2.1), at a share of the card's peak, and the traffic
of everything between the products; a micro-batch takes at least the time in which the host starts its kernels.
Servers: a decoding step reads the weights and the cache once (Pope et al. 2022, arXiv 2211.05102, section 2),
multiplies, and costs the host a time for each sequence; with small models the host's is the larger part.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import NamedTuple

from pipelinerl.world.forecast import GIB, ServerSetup, TrainerSetup, layer_bytes

_TERA = 1e12


class CardKind(NamedTuple):
    """Data sheet of a GPU: memory as the driver reports it, dense bf16 FLOP/s, bytes/s of its memory."""

    memory_gib: float
    flops: float
    bandwidth: float


#: NVIDIA's data sheets. Found in the driver's name of a card by the first key whose words it has.
CARDS = {
    "b200": CardKind(178.4, 2250 * _TERA, 8.0 * _TERA),
    "gh200": CardKind(95.6, 989 * _TERA, 4.0 * _TERA),
    "h200": CardKind(139.8, 989 * _TERA, 4.8 * _TERA),
    "h100 pcie": CardKind(79.6, 756 * _TERA, 2.0 * _TERA),
    "h100 nvl": CardKind(93.6, 835 * _TERA, 3.9 * _TERA),
    "h100": CardKind(79.6, 989 * _TERA, 3.35 * _TERA),
    "h800": CardKind(79.6, 989 * _TERA, 3.35 * _TERA),
    "h20": CardKind(95.6, 148 * _TERA, 4.0 * _TERA),
    "a100 40gb": CardKind(39.4, 312 * _TERA, 1.56 * _TERA),
    "a100": CardKind(79.2, 312 * _TERA, 2.0 * _TERA),
    "a800": CardKind(79.2, 312 * _TERA, 2.0 * _TERA),
    "l40s": CardKind(44.4, 362 * _TERA, 0.86 * _TERA),
    "l40": CardKind(44.4, 181 * _TERA, 0.86 * _TERA),
    "a6000": CardKind(47.5, 155 * _TERA, 0.77 * _TERA),
    "a10g": CardKind(22.1, 70 * _TERA, 0.6 * _TERA),
    "a10": CardKind(22.1, 125 * _TERA, 0.6 * _TERA),
    "l4": CardKind(22.1, 121 * _TERA, 0.3 * _TERA),
    "5090": CardKind(31.4, 209 * _TERA, 1.79 * _TERA),
    "4090": CardKind(23.5, 165 * _TERA, 1.01 * _TERA),
    "3090": CardKind(23.5, 71 * _TERA, 0.94 * _TERA),
}
#: Any other card is assumed to be as fast as an A100.
UNKNOWN_CARD = CARDS["a100"]
#: One core of a server's CPU in fp32, as PyTorch reaches it with the quickstart's model beside its server.
_CPU_CORE_FLOPS, _CPU_BANDWIDTH = 12e9, 15e9
#: Bytes per second of an optimizer in the machine's memory, and between cards (NVLink, several at once).
_HOST_BANDWIDTH, _LINK_BANDWIDTH = 20e9, 150e9

# What was measured, and where (docs/benchmarks.md has the table of each).
#: Trainer, runs of 0.1 to 3.1 B on one H200, packs of 2,048 to 16,384 tokens: share of the peak that products reach;
#: how often what a layer keeps of a token crosses the memory (norms, casts, activations), compiled or not, factors on
#: it with checkpointing and with adapters; bytes for each value of the optimizer's step.
_PRODUCT_SHARE, _CROSSINGS, _CHECKPOINTING_CROSSINGS, _ADAPTER_CROSSINGS = 0.65, 21, 1.15, 1.6
_OPTIMIZER_BYTES = 135
#: Seconds in which the host starts the kernels of one layer, forward and backward; added with checkpointing, with
#: adapters, and with products in fp32 or TF32, whose attention has more kernels. Small models and short packs wait.
_HOST_S_PER_LAYER, _HOST_CHECKPOINTING, _HOST_ADAPTER, _HOST_FP32 = 5.0e-3, 4.0e-3, 3.0e-3, 2.7e-3
#: The first two of a compiled layer. With adapters it was not measured.
_COMPILED_HOST_S_PER_LAYER, _COMPILED_HOST_CHECKPOINTING = 2.6e-3, 2.4e-3
#: Host seconds per sample: building its tensors, counting tokens, diagnostics (fitted to one run of 512 samples; 3e-5
#: less since all samples are collated at once).
_HOST_S_PER_SAMPLE = 1.2e-4
#: The longest row of a step over the mean of its rows.
_UNEVEN = 1.03
#: Share of the memory bandwidth that optimizer and decoding reach.
_BANDWIDTH_SHARE = 0.7
#: Share of the peak in prompts and large decoding batches.
_SERVER_SHARE = 0.5
#: Seconds of the engine process for a step: at least, and for each sequence beyond those that the least covers. Uneven
#: answers whose requests come and go (one H200, 135 M): 40 ms with 512 sequences, 16 to 23 ms with 256, 7 ms with 128.
_HOST_S_PER_STEP, _HOST_S_PER_TOKEN, _HOST_S_COVERED = 4.5e-3, 86e-6, 3.4e-3
#: The same on a CPU (0.6 M: 8 ms with 64).
_CPU_HOST_S_PER_STEP, _CPU_HOST_S_PER_TOKEN = 2e-3, 95e-6
#: Where several processes compute on one card at once (one H200, 135 M): four servers beside a trainer make it 2.9
#: times as slow and get about half of their tokens; one server does not matter. By each server beyond the first. With
#: MPS the trainer hardly notices four servers (1.70 s a step instead of 1.6), nor they it.
_TRAINER_SLOWED, _SERVERS_SLOWED = 0.63, 0.3
_TRAINER_SLOWED_MPS, _SERVERS_SLOWED_MPS = 0.02, 0.0
#: How much longer the device takes for the kernels of servers and trainer at once than for both, one after the other
#: (1.5 B, two runs, four servers).
_MIXED = 1.15
#: A weight update of the trainer: at least, and bytes per second (0.135 to 7 B; IPC and NCCL on one host).
_UPDATE_S, _UPDATE_BANDWIDTH = 0.035, 100e9
#: Of a trainer that is the slower side, from one step to the next: bookkeeping, and reading the batch that is ready.
_BETWEEN_STEPS_S = 0.02
#: Where servers and trainer alternate (135 M, 512 short answers on one and two H200): a server's API process for each
#: request, which no work of the engine hides then; a round's first requests and last answers; sleeping and waking.
_REQUEST_S, _ROUND_S, _CHANGEOVER_S = 1.0e-3, 0.15, 0.12
#: Of the samples that may be in flight beyond the batch in training, those that are being sampled while servers are the
#: slower side: the others are ready, or wait for the rest of their group (groups of 8 uneven answers, four servers).
_RUNNING_SHARE = 0.55
#: Of a process that runs rollouts, for each one of one short answer, pauses included (4.2e-4 to 6.5e-4 on four hosts of
#: H200s).
_ROLLOUT_S = 5e-4
#: Sizes (billions of parameters) between which trainer and servers were measured on the cards below.
_MEASURED_BILLIONS = (0.1, 1.6)
_MEASURED_CARDS = ("h200",)


@dataclass(frozen=True)
class Machine:
    """What a job computes on: a GPU with `memory_bytes` in a machine with `host_bytes`, or cores of a machine."""

    name: str
    memory_bytes: float
    flops: float
    bandwidth: float
    on_cpu: bool = False
    host_bytes: float = 0.0


def cpu_machine(memory_bytes: float, cores: int) -> Machine:
    return Machine(f"{cores} CPU cores", memory_bytes, cores * _CPU_CORE_FLOPS, _CPU_BANDWIDTH, True, memory_bytes)


def _is_named(key: str, name: str) -> bool:
    return set(key.split()) <= set(re.findall(r"[a-z0-9]+", name.lower()))


def card_kind(name: str) -> CardKind | None:
    """The data sheet of a card by its name; None: not in `CARDS`."""
    return next((kind for key, kind in CARDS.items() if _is_named(key, name)), None)


def card_machine(name: str, memory_bytes: float | None = None) -> Machine:
    """A card by its name (the driver's, or a key of `CARDS`); `memory_bytes`: None: that of its data sheet."""
    kind = card_kind(name) or UNKNOWN_CARD
    return Machine(name, memory_bytes or kind.memory_gib * GIB, kind.flops, kind.bandwidth)


@dataclass(frozen=True)
class Work:
    """What an optimizer step is made of, on average."""

    samples: int
    prompt_tokens: float
    output_tokens: float
    #: Rollouts in progress at one server at most.
    concurrency: int
    #: Tokens of a sample that go through the trainer's layers; None: all.
    computed_tokens: float | None = None

    @property
    def length(self) -> float:
        return self.prompt_tokens + self.output_tokens

    @property
    def tokens(self) -> float:
        return self.samples * self.length

    @property
    def computed(self) -> float:
        """Tokens of a step that go through the trainer's layers."""
        return self.samples * (self.length if self.computed_tokens is None else self.computed_tokens)


def micro_batches_of(setup: TrainerSetup, work: Work) -> int:
    """Micro-batches of each rank in a step, if its rows are full."""
    return _rows(setup, work.tokens, work.computed)


def _rows(setup: TrainerSetup, tokens: float, computed: float) -> int:
    in_rows = computed + setup.shared_room * (tokens - computed)
    return max(1, math.ceil(in_rows / setup.ranks / max(setup.pack_tokens, 1)))


def largest_micro_batch(setup: TrainerSetup, tokens: float, computed: float) -> TrainerSetup:
    """`setup` with the tokens of its largest micro-batch in a step, whose rows are filled evenly.

    Args:
        tokens: of the step, on all ranks; `computed`: those that the trainer computes.
    """
    if setup.shared_room == 1:  # they are kept in full
        computed = tokens
    shared, rows = (tokens - computed) / setup.ranks, _rows(setup, tokens, computed)
    most = computed / setup.ranks
    if rows > 1:
        most = min(_UNEVEN * most / rows, setup.pack_tokens - setup.shared_room * shared / rows)
    return replace(setup, pack_tokens=math.ceil(most), shared_tokens=math.ceil(shared / rows))


def trainer_device_seconds(setup: TrainerSetup, work: Work, machine: Machine) -> float:
    """Seconds in which the micro-batches of a step keep the device of a rank busy."""
    shape, is_lora = setup.shape, bool(setup.lora_rank)
    # A backward pass costs two forward passes, one of them for gradients of matrices, which frozen ones do without.
    passes = 3 + setup.checkpointing - is_lora
    attention = 2 * shape.layers * shape.heads * shape.head_dim * work.length  # causal: half of 4
    # The head computes its logits once more in the backward pass, for tokens that were sampled.
    head = (6 if is_lora else 8) * shape.embedding * work.output_tokens / max(work.length, 1)
    tokens, computed = work.tokens / setup.ranks, work.computed / setup.ranks
    flops = computed * passes * 2 * shape.active_matrices + tokens * (passes * attention + head)
    if machine.on_cpu:
        return flops / machine.flops
    slower = {"bf16": 1.0, "tf32": 2.0, "fp32": 15.0}[setup.products]
    kept = shape.layers * layer_bytes(setup) * _CROSSINGS
    kept *= (_CHECKPOINTING_CROSSINGS if setup.checkpointing else 1) * (_ADAPTER_CROSSINGS if is_lora else 1)
    return flops * slower / (machine.flops * _PRODUCT_SHARE) + computed * kept / machine.bandwidth


def train_seconds(setup: TrainerSetup, work: Work, machine: Machine) -> float:
    """Seconds of the trainer's part of a step: micro-batches and optimizer, on `setup.ranks` ranks."""
    shape, is_lora = setup.shape, bool(setup.lora_rank)
    device, micro_batches = trainer_device_seconds(setup, work, machine), micro_batches_of(setup, work)
    if machine.on_cpu:
        return device + _OPTIMIZER_BYTES * setup.trained / machine.bandwidth
    host, again = _HOST_S_PER_LAYER, _HOST_CHECKPOINTING
    if setup.is_compiled:
        host, again = _COMPILED_HOST_S_PER_LAYER, _COMPILED_HOST_CHECKPOINTING
    host += again if setup.checkpointing else 0
    host += (2 if setup.checkpointing else 1) * (_HOST_ADAPTER if is_lora else 0)
    host += 0 if setup.products == "bf16" else _HOST_FP32
    states = setup.trained / (setup.ranks if setup.sharding != "plain" else 1)
    optimizer = _OPTIMIZER_BYTES * states / machine.bandwidth
    if setup.optimizer_on_host:
        optimizer = (32 + 6) * states / _HOST_BANDWIDTH
    travel = 0.0
    if setup.ranks > 1:
        # Gradients, and gathered weights where they are sharded, travel between ranks.
        rounds = micro_batches * 3 if setup.sharding in ("fsdp", "zero3") else 2
        travel = rounds * 2 * setup.trained / _LINK_BANDWIDTH
    samples = work.samples / setup.ranks * _HOST_S_PER_SAMPLE
    return max(device, micro_batches * shape.layers * host) + samples + optimizer + travel


def _sequences(setup: ServerSetup, work: Work) -> int:
    return max(1, min(work.concurrency, setup.max_sequences))


def server_device_seconds(setup: ServerSetup, work: Work, machine: Machine) -> float:
    """Seconds in which a token of each sequence of one server keeps its device busy."""
    shape, count = setup.shape, _sequences(setup, work)
    length = work.prompt_tokens + work.output_tokens / 2
    values = shape.active_matrices + shape.embedding
    reads = setup.weight_bytes * values + count * length * shape.kv_bytes(setup.kv_bytes)
    # Prompts are computed once for the tokens of an answer (or less: groups share them).
    prompt = work.prompt_tokens / max(work.output_tokens, 1) / 2
    flops = 2 * count * (values + prompt * shape.active_matrices)
    share = 1.0 if machine.on_cpu else _SERVER_SHARE
    bandwidth = machine.bandwidth * (1 if machine.on_cpu else _BANDWIDTH_SHARE)
    return max(reads / bandwidth, flops / (machine.flops * share)) / setup.gpus


def server_rate(setup: ServerSetup, work: Work, machine: Machine, on_card: int = 1) -> float:
    """Output tokens per second of one server with `work.concurrency` sequences, of `on_card` servers on its card."""
    device, count = server_device_seconds(setup, work, machine), _sequences(setup, work)
    host = max(_HOST_S_PER_STEP, count * _HOST_S_PER_TOKEN - _HOST_S_COVERED)
    if machine.on_cpu:
        host = _CPU_HOST_S_PER_STEP + count * _CPU_HOST_S_PER_TOKEN
    # Hosts work side by side, their steps on the card one after the other.
    return count / max(device + host, device * on_card)


@dataclass(frozen=True)
class StepForecast:
    """Seconds of one optimizer step by part.

    Attributes:
        generate_s: in which the samples of a step are made.
        rollouts_s: in which the processes that run rollouts handle them, at least.
        train_s: of the trainer's part.
        step_s: of the whole.
        lag: mean versions between sampling and training a token.
        turns: servers and trainer alternate.
    """

    generate_s: float
    rollouts_s: float
    train_s: float
    step_s: float
    lag: float
    server_tokens_s: float
    trainer_tokens_s: float
    samples_s: float
    turns: bool
    is_measured: bool

    @property
    def needs_workers(self) -> bool:
        """Whether servers and trainer wait for the processes that run rollouts."""
        return self.rollouts_s >= max(self.generate_s, self.train_s)

    @property
    def waits(self) -> str:
        """Which side waits, and for how long per step."""
        if self.turns:
            return f"they alternate: {self.generate_s:.2f} s of sampling, {self.train_s:.2f} s of training"
        if self.generate_s > self.train_s:
            why = ": more processes have to run rollouts (actor.rollout_workers)" if self.needs_workers else ""
            return f"the trainer waits {self.generate_s - self.train_s:.2f} s of each step for samples{why}"
        factor = self.train_s / max(self.generate_s, 1e-9)
        return f"the trainer is the bottleneck: the servers could be {factor:.1f} times as slow"


@dataclass(frozen=True)
class Layout:
    """How servers and trainer share the cards, and time.

    Attributes:
        servers: in all; `on_card` of them on each of their cards, next to the trainer if `shared`.
        turns: servers and trainer alternate, each time after `round_steps` steps; `sleeps`: by sleeping and waking.
        mps: processes that share a card compute at the same time.
        ahead: batches under way at most while the trainer is the slower side, the one in training included.
        most_ahead: the same while the servers are.
        workers: processes that run rollouts.
    """

    servers: int
    on_card: int = 1
    shared: bool = False
    turns: bool = False
    round_steps: int = 1
    sleeps: bool = False
    mps: bool = False
    ahead: float = 2.0
    most_ahead: float = 3.0
    workers: int = 1


def step_forecast(
    trainer: TrainerSetup, server: ServerSetup, layout: Layout, work: Work, machine: Machine
) -> StepForecast:
    """One optimizer step.

    Lag: where the servers are slower, the tokens of a batch are on average half as old as their sequences take
    (Little's law: sequences in progress over sequences a step), and wait half a step for the rest of their batch. Where
    the trainer is slower, all batches but the one in training are older than its version.
    """
    train_s = train_seconds(trainer, work, machine)
    running = _RUNNING_SHARE * (layout.most_ahead - 1) * work.samples / layout.servers
    if layout.turns:
        running = work.samples * layout.round_steps / layout.servers
    work = replace(work, concurrency=max(1, min(work.concurrency, round(running))))
    rate = layout.servers * server_rate(server, work, machine, layout.on_card)
    if layout.shared and not layout.turns:
        others = layout.on_card - 1
        rate /= 1 + (_SERVERS_SLOWED_MPS if layout.mps else _SERVERS_SLOWED) * others
        train_s *= 1 + (_TRAINER_SLOWED_MPS if layout.mps else _TRAINER_SLOWED) * others
    generate_s = work.samples * work.output_tokens / max(rate, 1e-9)
    if layout.shared and not layout.turns and not machine.on_cpu:
        # Both use the same device. The trainer, whose kernels are large, hardly notices.
        of_card = work.samples * work.output_tokens * layout.on_card / layout.servers
        served = of_card / _sequences(server, work) * server_device_seconds(server, work, machine)
        generate_s = max(generate_s, _MIXED * (trainer_device_seconds(trainer, work, machine) + served))
        rate = work.samples * work.output_tokens / generate_s
    rollouts_s = 0.0 if machine.on_cpu or layout.turns else work.samples * _ROLLOUT_S / layout.workers
    generate_s = max(generate_s, rollouts_s)
    update_s = _UPDATE_S + trainer.shape.parameters * trainer.served_bytes / _UPDATE_BANDWIDTH
    if layout.turns:
        generate_s += work.samples / layout.servers * _REQUEST_S + _ROUND_S / layout.round_steps
        update_s = (update_s + _CHANGEOVER_S * layout.sleeps) / layout.round_steps
    step_s = generate_s + train_s + update_s if layout.turns else max(generate_s, train_s + update_s + _BETWEEN_STEPS_S)
    in_progress = min(layout.servers * work.concurrency / max(work.samples, 1), layout.ahead)
    lag = in_progress / 2 + 0.5 if generate_s > train_s else max(0.0, layout.ahead - 1)
    billions = trainer.shape.parameters / 1e9
    known = any(_is_named(key, machine.name) for key in _MEASURED_CARDS) and trainer.sharding == "plain"
    return StepForecast(
        generate_s=generate_s,
        rollouts_s=rollouts_s,
        train_s=train_s,
        step_s=step_s,
        lag=0.0 if layout.turns else lag,
        server_tokens_s=rate,
        trainer_tokens_s=work.tokens / max(train_s, 1e-9),
        samples_s=work.samples / max(step_s, 1e-9),
        turns=layout.turns,
        is_measured=known and _MEASURED_BILLIONS[0] <= billions <= _MEASURED_BILLIONS[1],
    )
