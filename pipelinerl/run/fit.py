"""Whether a run fits its cards and how fast it will be: configuration and plan -> forecast, lines and refusals.

The arithmetic is in `world/forecast.py` and `world/rates.py`. Loads neither torch nor vLLM: sizes of models come from
`config.json`, those of cards from the driver or from `plan --card`.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby

from pipelinerl.actor.budget import lag_policy_of
from pipelinerl.config import RunConfig
from pipelinerl.config.schedule import rounds_of
from pipelinerl.errors import ConfigError
from pipelinerl.rl.packing import expected_computed_tokens
from pipelinerl.world import Cluster, WorldMap, cards_of, memory_of_machine
from pipelinerl.world.forecast import (
    CACHE,
    GIB,
    OPTIMIZER,
    SHARED_ROOM,
    Memory,
    ServerSetup,
    Sharding,
    TrainerSetup,
    cache_tokens,
    held_memory,
    least_memory,
    least_of_server,
    longest_sample,
    server_memory,
    server_setup,
    trainer_memory,
    trainer_setup,
)
from pipelinerl.world.model_shape import ModelShape
from pipelinerl.world.rates import Layout, Machine, StepForecast, Work, card_machine, cpu_machine, step_forecast
from pipelinerl.world.sharing import workers_for

#: What a sleeping server keeps on its card: CUDA's context and graphs.
_ASLEEP_BYTES = 1.2 * GIB
#: Launcher, actor and preprocessor together.
_OTHER_PROCESSES = 1.0 * GIB
#: By default prompts are assumed to be short, and answers half as long as allowed.
_PROMPT_TOKENS, _ANSWER_SHARE = 256, 0.5
_BETTER = 0.9


@dataclass(frozen=True)
class CardUse:
    """What one GPU (or the memory of a machine) holds at its peak."""

    name: str
    jobs: str
    memory: Memory
    least: float


@dataclass(frozen=True)
class RunForecast:
    """The forecast of a run. `uses` has one entry for all GPUs that hold the same."""

    config: RunConfig
    world: WorldMap
    machine: Machine
    shape: ModelShape
    trainer: TrainerSetup | None
    server: ServerSetup | None
    layout: Layout
    uses: list[CardUse]
    work: Work
    step: StepForecast | None

    @property
    def cards(self) -> int:
        return len({(job.node_rank, gpu) for job in self.world.jobs for gpu in job.gpus})

    @property
    def fits(self) -> bool:
        """Whether all peaks fit, and a server's cache holds one request."""
        room, server = self.machine.memory_bytes, self.server
        has_cache = server is None or cache_tokens(server, server_memory(server, room)) >= server.max_tokens
        return has_cache and all(use.memory.total <= room for use in self.uses)


def machine_here(config: RunConfig, cluster: Cluster) -> Machine | None:
    """What the run would use; unknown machines are taken to be like this one. None: its GPUs are configured but not
    here."""
    memory = cluster.host_bytes(range(cluster.world_size)) or memory_of_machine()
    if config.world.device == "cpu" or not cluster.num_gpus:
        return cpu_machine(memory, cluster.cores)
    if cluster.gpu_bytes is None:
        return None
    first = next(machine.gpus[0] for machine in cluster.nodes if machine.gpus)
    return replace(card_machine(cards_of([first])[0].name, cluster.gpu_bytes), host_bytes=memory)


def forecast_run(
    config: RunConfig,
    world: WorldMap,
    machine: Machine,
    shape: ModelShape,
    tokens: tuple[float, float] | None = None,
    computed_tokens: float | None = None,
) -> RunForecast:
    """The forecast of a run of a model of this shape.

    Args:
        tokens: of a prompt and of an answer, on average; None: assumed from the longest answer.
        computed_tokens: of a sample, in the trainer; None: as planned for groups of this size.
    """
    on_cpu, ranks = world.device == "cpu", len(world.jobs_of("finetune"))
    trainer = trainer_setup(config, shape, ranks, on_cpu) if ranks else None
    server = None
    if servers := [*world.jobs_of("actor_llm"), *world.jobs_of("preprocessor_llm")]:
        server = server_setup(config, shape, on_cpu)
        cache = server.cache_bytes if servers[0].cache_bytes is None else servers[0].cache_bytes
        server = replace(server, gpus=max(1, len(servers[0].gpus)), cache_bytes=cache)
    layout = _layout(config, world)
    prompt, answer = tokens or _assumed_tokens(config)
    finetune, samples = config.finetune, config.finetune.samples_per_step
    can_share = finetune.seq_packing and finetune.attn_implementation in ("auto", "segments")
    if computed_tokens is None and finetune.share_prefixes and can_share:
        shape_of_step = (samples, config.attempts, max(1, ranks), finetune.seq_length)
        room = trainer.shared_room if trainer else SHARED_ROOM
        computed_tokens = expected_computed_tokens(prompt, answer, *shape_of_step, room)
    work = Work(samples, prompt, answer, config.actor.llm_max_rollouts, computed_tokens)
    step = None
    if trainer and server and layout.servers:
        step = step_forecast(trainer, server, layout, work, machine)
    uses = [*_uses(config, world, machine, trainer, server)]
    return RunForecast(config, world, machine, shape, trainer, server, layout, uses, work, step)


def _assumed_tokens(config: RunConfig) -> tuple[float, float]:
    longest = longest_sample(config)
    answer = max(1.0, min(config.llm.parameters.max_tokens, longest) * _ANSWER_SHARE)
    return float(max(1, min(_PROMPT_TOKENS, longest // 4, longest - answer))), answer


def _layout(config: RunConfig, world: WorldMap) -> Layout:
    servers = world.jobs_of("actor_llm")
    users = Counter((job.node_rank, gpu) for job in servers for gpu in job.gpus)
    ranks = {(job.node_rank, gpu) for job in world.jobs_of("finetune") for gpu in job.gpus}
    most = 2.0 if config.max_lag is None else config.max_lag / config.finetune.samples_per_step
    rounds = rounds_of(config)
    # Code of the user is not imported in the launcher.
    ahead = most if "." in config.lag_policy else lag_policy_of(config).batches_ahead(most)
    return Layout(
        servers=len(servers),
        on_card=max(users.values(), default=1),
        shared=any(place in ranks for place in users),
        turns=rounds is not None or config.max_lag == 0,
        round_steps=1 if rounds is None else rounds.steps,
        sleeps=world.device == "cuda" and config.world.placement == "colocated",
        mps=config.world.mps and world.device == "cuda",
        ahead=1 + ahead,
        most_ahead=1 + most,
        workers=max((job.workers for job in world.jobs_of("actor")), default=1),
    )


def _uses(
    config: RunConfig, world: WorldMap, machine: Machine, trainer: TrainerSetup | None, server: ServerSetup | None
) -> Iterator[CardUse]:
    """What each card holds."""
    jobs = defaultdict[tuple[int, str], list[str]](list)
    for job in world.jobs:
        if job.kind in ("actor_llm", "preprocessor_llm", "finetune"):
            for gpu in job.gpus if world.device == "cuda" else [""]:
                jobs[job.node_rank, gpu].append("rank" if job.kind == "finetune" else "server")
    is_cpu = world.device == "cpu"
    for kinds, group in groupby(sorted(jobs.items(), key=lambda item: (item[1], item[0])), key=lambda item: item[1]):
        places = [place for place, _ in group]
        names = ", ".join(gpu if world.world_size == 1 else f"{node}:{gpu}" for node, gpu in sorted(places))
        servers, ranks = kinds.count("server"), kinds.count("rank")
        of_server = server_memory(server, machine.memory_bytes) if server and servers else Memory({}, {})
        of_rank = trainer_memory(trainer) if trainer and ranks else Memory({}, {})
        fixed = servers * least_of_server(server) if server else 0.0
        needed = ranks * least_memory(trainer) if trainer else 0.0
        parts, least = _sum((servers, of_server.parts), (ranks, of_rank.parts)), fixed + needed
        if servers and ranks and trainer and config.world.colocated is not None and not is_cpu:
            held = held_memory(trainer)
            if config.world.colocated.offload_optimizer:
                held = {name: size for name, size in held.items() if name != OPTIMIZER}
            asleep = {"sleeping servers": _ASLEEP_BYTES}
            turns = [_sum((servers, of_server.parts), (ranks, held)), _sum((servers, asleep), (ranks, of_rank.parts))]
            parts = max(turns, key=lambda turn: sum(turn.values()))
            least = max(fixed + ranks * sum(held.values()), needed + servers * _ASLEEP_BYTES)
        if is_cpu:
            parts["actor and launcher"] = _OTHER_PROCESSES
        words = [
            f"{count} {kind}{'s' * (count > 1)}" for kind, count in (("server", servers), ("rank", ranks)) if count
        ]
        yield CardUse("the machine" if is_cpu else f"GPU {names}", " and ".join(words), Memory(parts, {}), least)


def _sum(*counted: tuple[int, Mapping[str, float]]) -> dict[str, float]:
    total = defaultdict[str, float](float)
    for count, parts in counted:
        for name, size in parts.items():
            total[name] += count * size
    return dict(total)


def faults_of(forecast: RunForecast) -> list[ConfigError]:
    """Why a run cannot work: not enough memory for weights, gradients and optimizer state."""
    return [*_trainer_faults(forecast), *_server_faults(forecast)]


def _trainer_faults(forecast: RunForecast) -> Iterator[ConfigError]:
    room, trainer, config = forecast.machine.memory_bytes, forecast.trainer, forecast.config
    for use in forecast.uses:
        if use.least <= room or "rank" not in use.jobs:  # servers alone: see `_server_faults`
            continue
        how = (
            "" if trainer is None else ", LoRA" if trainer.lora_rank else f", full training, backend {trainer.sharding}"
        )
        yield ConfigError(
            "model_path",
            f"{config.model_path} ({_billions(forecast.shape)} parameters by its {forecast.shape.source}{how})",
            f"something that fits the {_gib(room)} of {use.name}: weights, gradients and optimizer state of its "
            f"{use.jobs} alone take {_gib(use.least)}, with activations and caches {_gib(use.memory.total)}",
            advice_text(forecast),
        )
    of_node = Counter(job.node_rank for job in forecast.world.jobs_of("finetune"))
    host = trainer_memory(trainer).host_total * max(of_node.values()) if trainer else 0
    if host > forecast.machine.host_bytes:
        yield ConfigError(
            "backend.config",
            getattr(config.backend, "config", config.backend.type),
            f"at most {_gib(forecast.machine.host_bytes)} of memory in the machine; it needs {_gib(host)} there",
            "Use a stage without offload and more ranks, or finetune.lora.enabled=true.",
        )


def _server_faults(forecast: RunForecast) -> Iterator[ConfigError]:
    server, machine = forecast.server, forecast.machine
    if server is None or server.on_cpu:
        return
    # With a cache of a fixed size vLLM ignores its share.
    share = server.share if server.cache_bytes is None else 1.0
    if least_of_server(server) <= share * machine.memory_bytes:
        return
    yield ConfigError(
        "vllm_config.vllm_kwargs.tensor-parallel-size",
        server.gpus,
        f"weights that fit {share:g} of the {_gib(machine.memory_bytes)} of a GPU "
        f"(gpu-memory-utilization); each GPU of a server would hold {_gib(least_of_server(server))} of them",
        "Raise it so that more GPUs share the weights, or raise gpu-memory-utilization.",
    )


def advice_text(forecast: RunForecast) -> str:
    """The smallest changes that make the trainer fit."""
    trainer, machine, layout, found = forecast.trainer, forecast.machine, forecast.layout, list[Remedy]()
    if trainer is not None:
        # Other jobs keep what they hold on the GPUs of the trainer.
        own = trainer_memory(trainer).total
        others = max((use.memory.total - own for use in forecast.uses if "rank" in use.jobs), default=0.0)
        room, cards = machine.memory_bytes - max(0.0, others), max(1, forecast.cards - layout.servers // layout.on_card)
        found = remedies(trainer, room, forecast.machine.host_bytes, cards, longest_sample(forecast.config))
    if not found:
        return "Use a smaller model, or a machine with more memory."
    return "It fits with " + ", or ".join(f"{each.overrides} ({_gib(each.peak)})" for each in found[:3]) + "."


def _smaller_cache(forecast: RunForecast, use: CardUse) -> str | None:
    """How much of the GPU the servers may use, if a smaller cache is enough to make room."""
    room, server = forecast.machine.memory_bytes, forecast.server
    cache, excess = use.memory.parts.get(CACHE, 0.0), use.memory.total - room
    if server is None or server.on_cpu or "rank" not in use.jobs or excess > cache / 2:
        return None
    if server.cache_bytes is not None:
        return f"Set vllm_config.vllm_kwargs.kv-cache-memory-bytes={int(server.cache_bytes * (1 - excess / cache))}."
    share = math.floor(100 * (server.share - excess / room)) / 100
    return f"Set vllm_config.vllm_kwargs.gpu-memory-utilization={share}."


def lines_of(forecast: RunForecast) -> list[str]:
    """The forecast as lines for the user."""
    machine, shape = forecast.machine, forecast.shape
    where = machine.name if machine.on_cpu else f"{forecast.cards} x {machine.name}"
    source = "a guess by its name" if shape.source == "name" else f"from its {shape.source}"
    lines = [f"forecast: {_billions(shape)} parameters ({source}) on {where} with {_gib(machine.memory_bytes)}"]
    for use in forecast.uses:
        parts = sorted(use.memory.parts.items(), key=lambda item: -item[1])
        shown = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts if size >= 0.05 * GIB)
        lines.append(f"memory of {use.name} ({use.jobs}): {_gib(use.memory.total)}: {shown}")
        if use.memory.total > machine.memory_bytes >= use.least:
            lines.append(
                f"note: that exceeds the available memory. {_smaller_cache(forecast, use) or advice_text(forecast)}"
            )
    if forecast.server is not None:
        tokens = max(0.0, cache_tokens(forecast.server, server_memory(forecast.server, machine.memory_bytes)))
        longest = max(1, forecast.server.max_tokens)
        lines.append(
            f"cache of a server: {max(0, int(tokens)):,} tokens, {tokens / longest:.0f} requests of {longest:,}"
        )
    step, work = forecast.step, forecast.work
    if step is not None:
        sure = "estimated, within a factor of 2"
        if step.is_measured:
            sure = "sizes like it were measured: trainer within 20 %, servers within a factor of 1.5"
        lines.append(
            f"a step of {work.samples:,} samples of {work.prompt_tokens:,.0f} + {work.output_tokens:,.0f} tokens: "
            f"{step.step_s:.2f} s, {step.samples_s:,.1f} samples/s ({sure}); servers {step.server_tokens_s:,.0f} "
            f"tokens/s, trainer {step.trainer_tokens_s:,.0f} tokens/s; {step.waits}; lag about {step.lag:.1f} versions"
        )
        if (better := better_split(forecast)) is not None:
            lines.append(better)
    return lines


def better_split(forecast: RunForecast) -> str | None:
    """The fastest split of the GPUs, if at least a tenth faster than the configured one."""
    trainer, server, step = forecast.trainer, forecast.server, forecast.step
    if trainer is None or server is None or step is None or forecast.cards < 2 or trainer.on_cpu:
        return None
    room, splits = forecast.machine.memory_bytes, list[tuple[float, int, int]]()
    for ranks in range(1, forecast.cards):
        servers = (forecast.cards - ranks) // server.gpus * forecast.layout.on_card
        other, layout = (
            replace(trainer, ranks=ranks),
            replace(forecast.layout, servers=servers, shared=False, turns=False),
        )
        if forecast.config.actor.rollout_workers == "auto":
            layout = replace(layout, workers=workers_for(servers))
        if servers and trainer_memory(other).total <= room:
            found = step_forecast(other, server, layout, forecast.work, forecast.machine)
            splits.append((found.step_s, servers, ranks))
    seconds, servers, ranks = min(splits, key=lambda split: split[0], default=(math.inf, 0, 0))
    if seconds >= _BETTER * (step.step_s if forecast.fits else math.inf):
        return None
    several = f" world.servers_per_gpu={forecast.layout.on_card}" if forecast.layout.on_card > 1 else ""
    return (
        f"a better split: world.num_actor_llms={servers}{several} world.num_finetune_ranks={ranks} would take "
        f"{seconds:.2f} s a step (all splits were tried)"
    )


def _billions(shape: ModelShape) -> str:
    count = shape.parameters
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.1f} M"


def _gib(size: float) -> str:
    return f"{size / GIB:.1f} GiB"


@dataclass(frozen=True)
class Remedy:
    """A change that makes a trainer fit: the overrides, and the resulting peaks of a GPU and of the machine."""

    overrides: str
    peak: float
    host: float


def remedies(setup: TrainerSetup, room: float, host_room: float, most_ranks: int, longest_sample: int) -> list[Remedy]:
    """The smallest changes that make the trainer fit, one of each kind, the smallest first.

    Args:
        room: bytes of a card; `host_room`: of a machine.
        most_ranks: GPUs available to the trainer.
        longest_sample: `finetune.seq_length` cannot be below.
    """
    lengths = [setup.pack_tokens]
    while lengths[-1] // 2 >= max(longest_sample, 256):
        lengths.append(lengths[-1] // 2)
    found, kinds = list[Remedy](), set[tuple[Sharding, bool, bool]]()
    for words, other in _kinds(setup, most_ranks):
        kind = (other.sharding, other.optimizer_on_host, bool(other.lora_rank))
        for checkpointing, length in [(flag, tokens) for flag in (setup.checkpointing, True) for tokens in lengths]:
            changed = replace(other, checkpointing=checkpointing, pack_tokens=length)
            memory = trainer_memory(changed)
            host = memory.host_total * changed.ranks
            if kind in kinds or changed == setup or memory.total > room or host > host_room:
                continue
            kinds.add(kind)
            more = [] if checkpointing == setup.checkpointing else ["finetune.gradient_checkpointing=true"]
            more += [] if length == setup.pack_tokens else [f"finetune.seq_length={length}"]
            found.append(Remedy(" ".join([*words, *more]), memory.total, host))
    return found


def _kinds(setup: TrainerSetup, most_ranks: int) -> list[tuple[list[str], TrainerSetup]]:
    """Ways to train the same model, with their overrides: as it is, on more GPUs, with offload, with LoRA."""
    found = [(list[str](), setup)]
    if setup.on_cpu:
        return found
    counts = [count for count in sorted({setup.ranks, 2, 4, 8, 16, 32, 64}) if count >= setup.ranks and count > 1]
    more = list[tuple[list[str], TrainerSetup]]()
    if not setup.lora_rank:
        zero = ["backend=deepspeed", "backend.config=deepspeed_stage3_bf16"]
        for count in counts:
            words = zero if count == setup.ranks else [*zero, f"world.num_finetune_ranks={count}"]
            wider = replace(setup, sharding="zero3", ranks=count, optimizer_on_host=False, parameters_on_host=False)
            (found if count <= most_ranks else more).append((words, wider))
        lora = replace(setup, lora_rank=16, sharding="plain", optimizer_on_host=False, parameters_on_host=False)
        words = [] if setup.sharding == "plain" else ["backend=plain"]
        found.append((["finetune.lora.enabled=true", *words], lora))
        offload = replace(setup, sharding="zero2", optimizer_on_host=True, parameters_on_host=False)
        for stage, other in ((2, offload), (3, replace(offload, sharding="zero3", parameters_on_host=True))):
            found.append(([zero[0], f"backend.config=deepspeed_stage{stage}_bf16_offload"], other))
    return [*found, *(([*words, "(more GPUs than available)"], wider) for words, wider in more)]
