"""Checks before any file is written or process started: the list `CHECKS` at the end.

User code is imported in a child process only, so the launcher never loads it (or torch).
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pipelinerl.actor.budget import lag_policy_of
from pipelinerl.config import RunConfig
from pipelinerl.config.advice import epoch_notes
from pipelinerl.config.load import save_config
from pipelinerl.config.validate import missing_task
from pipelinerl.domains.data_sets import preview
from pipelinerl.domains.shapes import SHAPES
from pipelinerl.errors import EXIT_USER_ERROR, ConfigError, DomainError, UserError
from pipelinerl.inference.arguments import (
    BINDING_KEY,
    QUEUE_BYTES,
    UNBOUND,
    check_names,
    check_options,
    foreign_variables,
    start_method,
)
from pipelinerl.role import SECRET_KEYS
from pipelinerl.run.fit import faults_of, forecast_run, lines_of, machine_here
from pipelinerl.run.last_error import LogPart, last_error, user_error
from pipelinerl.run.model_folder import (
    check_adapter,
    check_context,
    check_model,
    check_parallel_size,
    count_parameters,
    read_shape,
)
from pipelinerl.run.start import SOCKET_FOLDER_KEY, inspect, socket_parent, trainer_variables
from pipelinerl.rundir.durable import ScratchFolder
from pipelinerl.streams.hub import backend_of
from pipelinerl.world import Cluster, build_world_map, nvml_cards

DOMAIN_CHECK_TIMEOUT_S = 300.0
#: A training state holds fp32 weights and the two moments of AdamW. A token that was sampled takes at most so much in
#: both streams together: id, label and log-prob as JSON. The rest of a sample is ids, spans and metadata.
_BYTES_PER_PARAMETER, _BYTES_PER_TOKEN, _BYTES_PER_SAMPLE = 12, 70, 2000
SHARED_MEMORY = Path("/dev/shm")
#: Prefixes of what the check of the user's code prints: numbers of problems for training and evaluation; remarks.
COUNTS, REMARK = "counts of the check: ", "remark of the check: "


@dataclass(frozen=True)
class Start:
    """A run to be started. `search_dirs` are folders with the user's modules. `has_agents`: nodes check themselves.
    `is_restart`: this launcher has checked and started the run before."""

    config: RunConfig
    cluster: Cluster
    environ: Mapping[str, str]
    search_dirs: Sequence[Path] = ()
    is_dry_run: bool = False
    has_agents: bool = False
    is_restart: bool = False

    @property
    def has_servers(self) -> bool:
        return self.config.has_stage("actor_llm") or self.config.has_stage("preprocessor_llm")


class Check(NamedTuple):
    """One check: raises `UserError`, or returns lines to show.

    `where`: at a start it is made by the launcher, by each node of a cluster too (`every_node`; with the configuration
    that the launcher saved), by the machines that run jobs alone (`machine`; the launcher's may be another one), or not
    at all. `dry_run`: what a dry run does.
    """

    run: Callable[[Start], list[str]]
    dry_run: Literal["skip", "refuse", "report"] = "skip"
    where: Literal["launcher", "every_node", "machine", "nowhere"] = "launcher"


def check_start(start: Start) -> list[str]:
    """Refuse a start that cannot work. Returns lines for the user: the number of problems, and remarks.

    Raises:
        UserError: the first fault.
    """
    skipped = {"nowhere", "machine"} if start.has_agents else {"nowhere"}
    return [line for check in CHECKS if check.where not in skipped for line in check.run(start)]


def check_node(start: Start) -> None:
    """The checks of a node of a cluster. Raises UserError."""
    for check in CHECKS:
        if check.where in ("every_node", "machine"):
            check.run(start)


def check_dry_run(start: Start) -> str:
    """Check a start without running user code, using the network or loading torch; return lines for the user.

    Raises:
        UserError: the plan itself is impossible.
    """
    for check in CHECKS:
        if check.dry_run == "refuse":
            check.run(start)
    lines, faults = list[str](), list[str]()
    for check in CHECKS:
        if check.dry_run == "report":
            try:
                lines += check.run(start)
            except UserError as error:
                faults.append(f"- {error}")
    if faults:
        lines += ["a run here would be refused:", *faults]
    else:
        lines.append("output_dir, model and task were checked; no problems were found")
    lines.append(
        "not checked: free devices and ports, the task's code (`check-domain` with the same arguments runs it)"
    )
    return "\n".join(lines)


def check_task(start: Start) -> list[str]:
    """Refuse a template for other configurations. A dry run may plan one, but it has no task to run."""
    if (fault := missing_task(start.config)) is not None:
        raise fault
    return []


def check_output_dir(start: Start) -> list[str]:
    inspect(start.config)
    return []


def check_vllm(start: Start) -> list[str]:
    """Refuse to start servers if vLLM is not installed. It is searched for, not imported."""
    spec = importlib.util.find_spec("vllm") if start.has_servers else None
    # A folder named vllm in the working directory is no installation; it has no origin.
    if start.has_servers and (spec is None or spec.origin is None):
        raise UserError(
            f"vLLM, which the servers of a run need, is not installed in the Python environment {sys.prefix}. "
            "Install it: pip install 'pipelinerl[gpu]' where there are NVIDIA GPUs, else 'pipelinerl[cpu]' (in a "
            "checkout: `bash scripts/setup.sh`, which also finds the CPU build of torch)."
        )
    return []


def check_device(start: Start) -> list[str]:
    """Refuse GPUs that the environment names but that do not exist."""
    gpus = start.cluster.nodes[start.cluster.rank].gpus
    if start.config.world.device == "cpu" or not gpus:
        return []
    found = len(nvml_cards())
    too_high = [gpu for gpu in gpus if gpu.isdecimal() and int(gpu) >= found]
    expected, next_step = f"indices below {found}, the number of GPUs here", f"Remove {', '.join(too_high)}."
    if found == 0:
        expected = "GPUs of this machine; it has no NVIDIA driver or no GPU"
        next_step = "Unset CUDA_VISIBLE_DEVICES, or use world.device=cpu."
    elif not too_high:
        return []
    raise ConfigError("CUDA_VISIBLE_DEVICES", ",".join(gpus), expected, next_step)


def check_streams(start: Start) -> list[str]:
    """Refuse streams that cannot be used, for example because the server does not answer."""
    streams = start.config.streams
    backend_of(streams).check(streams, start.environ, start.cluster.world_size)
    return []


def check_model_path(start: Start) -> list[str]:
    return [f"note: {note}" for note in check_model(start.config, may_ask_hub=not start.is_dry_run)]


def check_fit(start: Start) -> list[str]:
    """Refuse a run that cannot fit its GPUs with any pack size; a dry run gets the whole forecast.

    Only sizes from weight files refuse a run: for a `config.json` or a name the formula may count other layers.
    """
    machine, shape = machine_here(start.config, start.cluster), read_shape(start.config.model_path)
    if machine is None or shape is None:
        return []
    world = build_world_map(start.config, start.cluster, model=shape)
    with_ranks = {job.node_rank for job in world.jobs_of("finetune")}
    host_bytes = start.cluster.host_bytes(with_ranks) or machine.host_bytes
    forecast = forecast_run(start.config, world, replace(machine, host_bytes=host_bytes), shape)
    faults = faults_of(forecast)
    if faults and shape.source == "weight files":
        raise faults[0]
    lines = [*lines_of(forecast), *(f"note: it may not fit: {fault}" for fault in faults)]
    return lines if start.is_dry_run else [line for line in lines if line.startswith("note: ")]


def check_disk(start: Start) -> list[str]:
    """How much the run will write, if the size of the model is known, and how much is free."""
    config, tuned = start.config, start.config.finetune
    parameters = count_parameters(config.model_path) if config.has_stage("finetune") else None
    if parameters is None:
        return []
    more = len([step for step in tuned.also_save_steps if step <= tuned.last_step])
    saves = -(-tuned.last_step // tuned.save_checkpoint_steps) + more
    # A new one is written before the oldest is removed.
    states = min(saves, (tuned.keep_last_checkpoints or saves) + more + 1)
    models = (saves if tuned.keep_intermediate_checkpoints else min(saves, more + 2)) + 3 * bool(tuned.keep_best)
    is_16_bit = tuned.dtype == "bf16" or (
        tuned.dtype == "auto" and start.cluster.num_gpus and config.world.device != "cpu"
    )
    state = 0 if tuned.lora.enabled else parameters * _BYTES_PER_PARAMETER
    model = parameters * (2 if is_16_bit else 4)
    context = min(tuned.seq_length, config.vllm_config.number("max-model-len") or tuned.seq_length)
    samples = tuned.last_step * tuned.samples_per_step
    streams = samples * (context * _BYTES_PER_TOKEN + _BYTES_PER_SAMPLE)
    folder = Path(config.output_dir).absolute()
    free = shutil.disk_usage(next(each for each in (folder, *folder.parents) if each.exists())).free
    line = (
        f"disk: training states {states} x {_size(state)}, models {models} x {_size(model)}, streams at most "
        f"{_size(streams)} (if all samples have {context} tokens); {_size(free)} are free"
    )
    if free >= states * state + models * model:
        return [line]
    remedy = "finetune.keep_last_checkpoints=1, keep_intermediate_checkpoints=false or a larger save_checkpoint_steps"
    return [line, f"note: the disk of output_dir is too small for the models: set {remedy}, or use another disk"]


def _size(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e8 else f"{count / 1e6:.1f} MB"


def check_servers(start: Start) -> list[str]:
    """Refuse server options that vLLM would refuse half a minute after its start."""
    if start.has_servers:  # a stage without servers may use the configuration of the run that it reads
        check_names(check_options(start.config.vllm_config.vllm_kwargs)[0])
        check_parallel_size(start.config)
        check_context(start.config, start.environ)
    if start.config.has_stage("actor_llm"):
        check_adapter(start.config, start.config.world.device != "cpu" and start.cluster.num_gpus > 0)
    return []


def check_environment(start: Start) -> list[str]:
    """List environment variables that the processes will not get."""
    servers = ", ".join(foreign_variables(start.environ)) if start.has_servers else ""
    trainers = ", ".join(trainer_variables(start.environ)) if start.config.has_stage("finetune") else ""
    notes = {
        f"note: the servers do not get {servers}: the run decides on their addresses, access and models": servers,
        f"note: the trainer does not get {trainers}: the configuration decides how it trains": trainers,
    }
    return [note for note, names in notes.items() if names]


def check_server_files(start: Start) -> list[str]:
    """Refuse servers whose processes could not communicate: socket paths too long, shared memory too small."""
    if not start.has_servers:
        return []
    if socket_parent(start.environ) is None:
        folder = start.environ.get(SOCKET_FOLDER_KEY) or os.environ.get("TMPDIR")
        expected = "a writable folder with a short path (at most 70 characters), for the sockets of the servers"
        raise ConfigError(SOCKET_FOLDER_KEY, folder, expected, f"Set {SOCKET_FOLDER_KEY} to one.")
    option = start.config.vllm_config.option("distributed-executor-backend")[1]
    sizes = [start.config.vllm_config.number(f"{kind}-parallel-size") or 1 for kind in ("tensor", "pipeline", "data")]
    on_cpu = start.config.world.device == "cpu" or not start.cluster.num_gpus
    is_bound = start.config.vllm_config.option("numa-bind")[1] not in (None, False)
    has_own_worker = on_cpu and start_method({BINDING_KEY: UNBOUND, **start.environ}, on_cpu, is_bound) != "fork"
    if not SHARED_MEMORY.is_dir() or not (has_own_worker or math.prod(sizes) > 1 or option == "mp"):
        return []  # the engine is the only worker
    if (free := shutil.disk_usage(SHARED_MEMORY).free) < QUEUE_BYTES:
        remedy = "--shm-size=2g (Docker), a volume of medium Memory there (Kubernetes), or remove what fills it"
        expected = f"at least {_size(QUEUE_BYTES)} free there, for the queues between a server's processes"
        raise ConfigError(str(SHARED_MEMORY), f"{_size(free)} free", expected, f"Use {remedy}.")
    return []


def check_tracking(start: Start) -> list[str]:
    """Refuse a tracker whose package or class is missing. Later that would only be a warning."""
    asked = {
        "tensorboard.enabled": ("tensorboard", start.config.tensorboard.enabled),
        "tracking.trackio_project": ("trackio", start.config.tracking.trackio_project),
    }
    for key, (package, value) in asked.items():
        # A folder of that name next to the user's files counts as a package, but has no origin.
        if value and getattr(importlib.util.find_spec(package), "origin", None) is None:
            raise ConfigError(key, value, f"the package {package}", f"Install it: pip install pipelinerl[{package}].")
    for path in start.config.tracking.sinks:
        if (fault := function_fault(path, None, start.search_dirs)) is not None:
            raise UserError(f"tracking.sinks: got {path!r}: {fault}")
    return []


def check_module_names(start: Start) -> list[str]:
    """Refuse a task whose module shadows one of the standard library."""
    if not start.config.has_stage("actor"):
        return []
    paths = {"dataset_loader": start.config.dataset_loader, "actor.rollout_policy": start.config.actor.rollout_policy}
    for key, path in paths.items():
        name = (path or "").partition(".")[0]
        if name in sys.stdlib_module_names and PathFinder.find_spec(name, [*map(str, start.search_dirs)]) is not None:
            raise ConfigError(
                key, path, "a module that does not shadow one of the standard library", "Rename its file."
            )
    return []


def check_dataset_loader(start: Start) -> list[str]:
    return _check_function("dataset_loader", start.config.dataset_loader, False, start)


def check_data_sets(start: Start) -> list[str]:
    """Refuse unknown data sets of a built-in domain and rows of the wrong shape; show rows of local files."""
    config = start.config
    module, _, function = (config.dataset_loader or "").rpartition(".")
    package, _, domain = module.rpartition(".")
    if not config.has_stage("actor") or (package, function) != ("pipelinerl.domains", "load_problems"):
        return []
    if domain not in SHAPES:
        return []
    train = [] if config.debug.mode == "evaluation" else config.train_dataset_names
    names = [*train, *config.plain_test_names, *(own.name for own in config.eval)]
    return preview(domain, names, config.dataset_loader_params.get("fields"))


def check_rollout_policy(start: Start) -> list[str]:
    return _check_function("actor.rollout_policy", start.config.actor.rollout_policy, True, start)


def check_lag_policy(start: Start) -> list[str]:
    if "." in start.config.lag_policy:
        return _check_function("lag_policy", start.config.lag_policy, None, start)
    lag_policy_of(start.config)
    return []


def _check_function(key: str, path: str | None, is_async: bool | None, start: Start) -> list[str]:
    """Find a function (`is_async` None: a class) in the source of its module, without importing it."""
    if start.config.has_stage("actor"):
        if not path:
            raise UserError(f"{key} is not set: a run has no task without it.")
        if (fault := function_fault(path, is_async, start.search_dirs)) is not None:
            raise UserError(f"{key}: got {path!r}: {fault}")
    return []


def check_domain(start: Start) -> list[str]:
    """Load the problems and run one rollout without servers, in a child process; return the number and remarks.

    Raises:
        UserError: with the message of the child.
    """
    config = start.config
    if start.is_restart or not config.has_stage("actor"):
        return []
    what = f"dataset_loader {config.dataset_loader} and actor.rollout_policy {config.actor.rollout_policy}"
    with ScratchFolder("check") as folder:
        file = save_config(config, folder / "exp_config.yaml")
        log = LogPart(folder / "stderr.log")
        paths = [*map(str, start.search_dirs), start.environ.get("PYTHONPATH", "")]
        env = {**start.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        for key in SECRET_KEYS:  # hidden from user code
            env.pop(key, None)
        argv = [sys.executable, "-m", "pipelinerl.analysis.check_domain", "--run-config", str(file)]
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE}
        try:
            with log.file.open("wb") as stderr:
                done = subprocess.run(
                    argv, env=env, **pipes, stderr=stderr, check=False, timeout=DOMAIN_CHECK_TIMEOUT_S
                )
        except subprocess.TimeoutExpired as error:
            late = f"importing {what} and loading the problems took over {DOMAIN_CHECK_TIMEOUT_S:.0f} s"
            raise DomainError(f"{late}. Make the module quick to import.") from error
        if done.returncode == EXIT_USER_ERROR:
            raise UserError(user_error(log) or last_error(log))
        problem = last_error(log) if done.returncode != 0 else ""
    printed = done.stdout.decode("utf-8", errors="replace").splitlines()  # user code may print too
    found = [match for line in printed if (match := re.fullmatch(rf"{COUNTS}(\d+) (\d+)", line))]
    if problem and not found:
        raise DomainError(f"the check of {what} failed: {problem}")
    if not found:
        raise DomainError(f"the code of {what} ended the process that checked it: it calls sys.exit() or os._exit().")
    notes = [line.removeprefix(REMARK) for line in printed if line.startswith(REMARK)]
    if problem:  # in a run it would end its worker
        notes.append(f"actor.rollout_policy: a dry rollout ended its process: {problem}")
    train, test = map(int, found[-1].groups())
    return [count_line(train, test), *(f"note: {note}" for note in [*epoch_notes(config, train), *notes])]


def count_line(train: int, test: int) -> str:
    """One line about the number of problems."""
    return f"{train} training problems, {test} test problems"


def function_fault(path: str, is_async: bool | None, search_dirs: Sequence[Path]) -> str | None:
    """Why the dotted `path` is no function of this kind (`is_async` None: no class), judging by the source of its
    module; None if nothing speaks against it."""
    module_name, _, name = path.rpartition(".")
    if not module_name:
        return "expected module and name with a dot between them"
    file = _module_file(module_name, search_dirs)
    if isinstance(file, str):
        return f"there is no module {file!r} in the folder of --config-dir, an installed package or on PYTHONPATH"
    if file is None:
        return None
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except (SyntaxError, ValueError) as error:
        return f"{file} is not valid Python: {error}"
    names = dict(_bound_names(tree.body))
    if name in names:
        node = names[name]
        if is_async and isinstance(node, ast.FunctionDef) and not node.decorator_list:
            return f"{file} defines it with `def`, expected `async def`"
        if is_async is False and isinstance(node, ast.AsyncFunctionDef):
            return f"{file} defines it with `async def`, expected `def`"
        return None
    if "*" in names or "__getattr__" in names:
        return None
    wanted = ast.ClassDef if is_async is None else ast.AsyncFunctionDef if is_async else ast.FunctionDef
    near = difflib.get_close_matches(name, [each for each, node in names.items() if isinstance(node, wanted)], n=1)
    return f"{file} has no {name!r}. " + (f"Did you mean {module_name}.{near[0]}?" if near else "Define it there.")


def _module_file(module_name: str, search_dirs: Sequence[Path]) -> Path | str | None:
    """The file of a module, found without importing its packages; the name of the missing module; None if it has no
    source."""
    first, *rest = module_name.split(".")
    spec: ModuleSpec | None = PathFinder.find_spec(first, [*map(str, search_dirs), *sys.path])
    if spec is None:
        spec = importlib.util.find_spec(first)  # an installed package may have its own finder
    name = first
    for part in rest:
        if spec is None:
            break
        name = f"{name}.{part}"
        locations = spec.submodule_search_locations
        spec = None if locations is None else PathFinder.find_spec(name, list(locations))
    if spec is None:
        return name
    return Path(spec.origin) if spec.origin is not None and spec.origin.endswith(".py") else None


def _bound_names(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.AST]]:
    """What a module binds at its top level, branches included; `*` for a star import."""
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname or alias.name.partition(".")[0], node) for alias in node.names)
        else:
            for part in ast.walk(node):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    yield part.id, part
            for block in ("body", "orelse", "finalbody", "handlers", "cases"):
                for inner in getattr(node, block, []):
                    yield from _bound_names(inner.body if not isinstance(inner, ast.stmt) else [inner])


#: Cheap checks first.
CHECKS = (
    Check(check_task),
    Check(check_output_dir, dry_run="report"),
    Check(check_vllm, where="machine"),
    Check(check_device, where="machine"),
    Check(check_streams, where="every_node"),
    Check(check_model_path, dry_run="report", where="every_node"),
    Check(check_fit, dry_run="report"),
    Check(check_disk, dry_run="report"),
    Check(check_servers, dry_run="refuse", where="every_node"),
    Check(check_environment, dry_run="report"),
    Check(check_server_files, dry_run="report", where="machine"),
    Check(check_tracking, dry_run="refuse"),
    Check(check_lag_policy, dry_run="refuse"),
    Check(check_module_names, dry_run="report"),
    Check(check_dataset_loader, dry_run="report", where="nowhere"),  # `check_domain` calls it
    Check(check_rollout_policy, dry_run="report", where="nowhere"),
    Check(check_data_sets, dry_run="report", where="nowhere"),
    Check(check_domain),
)
