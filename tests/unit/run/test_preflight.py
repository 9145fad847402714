"""What is refused before anything is written, by a start, a dry run and a node above 0."""

from __future__ import annotations

import json
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes.model_folder import save_model_folder
from safetensors.torch import save_file

from pipelinerl import launch
from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError, UserError
from pipelinerl.run import preflight
from pipelinerl.run.fit import faults_of, forecast_run
from pipelinerl.run.model_folder import count_parameters
from pipelinerl.run.preflight import Start, check_dry_run, function_fault
from pipelinerl.world import Cluster, ClusterNode, build_world_map, usable_cores
from pipelinerl.world.model_shape import guess_shape
from pipelinerl.world.rates import card_machine


def start(changes: dict[str, Any], nodes: int = 1, gpus: tuple[str, ...] = (), **environ: str) -> Start:
    config = RunConfig.model_validate({"output_dir": "x", **changes})
    return Start(config, Cluster((ClusterNode("h", gpus, 1),) * nodes), environ)


def test_the_list_of_checks() -> None:
    """What is refused is the same everywhere; only who asks differs."""
    names = {check.run.__name__: check for check in preflight.CHECKS}
    assert len(names) == len(preflight.CHECKS)
    for name in ("check_streams", "check_model_path", "check_servers"):
        assert names[name].where == "every_node"
    for name in ("check_vllm", "check_device", "check_server_files"):
        assert names[name].where == "machine"
    assert names["check_domain"].dry_run == "skip" and list(names)[-1] == "check_domain"


def test_the_task_is_checked_once_by_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the check started a process")

    monkeypatch.setattr(preflight.subprocess, "run", refuse)
    with pytest.raises(AssertionError):
        preflight.check_domain(start({}))
    assert preflight.check_domain(replace(start({}), is_restart=True)) == []


def test_data_sets_of_built_in_domains_are_looked_at_in_a_dry_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1+1?", "answer": "2"}\n')
    loader = {"dataset_loader": "pipelinerl.domains.math.load_problems"}
    (line,) = preflight.check_data_sets(start({**loader, "train_dataset_names": [str(file)]}))
    assert "1+1?" in line
    with pytest.raises(UserError, match="gsm8k_train"):
        preflight.check_data_sets(start({**loader, "test_dataset_names": ["gsm8k_trian"]}))
    assert preflight.check_data_sets(start({"dataset_loader": "my.load", "train_dataset_names": ["x"]})) == []
    # What the run loads: the sets of `eval` too, and to evaluate nothing of training.
    with pytest.raises(UserError, match="gsm8k_train"):
        preflight.check_data_sets(start({**loader, "eval": [{"name": "gsm8k_trian"}]}))
    only = {"debug": {"mode": "evaluation"}, "train_dataset_names": ["gsm8k_trian"], "eval": [{"name": str(file)}]}
    (line,) = preflight.check_data_sets(start({**loader, **only}))
    assert "1+1?" in line


def test_several_nodes_need_a_redis_server_with_an_address() -> None:
    with pytest.raises(ConfigError) as caught:
        preflight.check_streams(start({"streams": {"backend": "redis"}}, 2))
    assert caught.value.key == "streams.url"


def test_o4_devices_are_compared_with_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "nvml_cards", lambda: ["GPU-xyz", "GPU-abc"])
    preflight.check_device(start({}, gpus=("1", "GPU-abc")))
    preflight.check_device(start({"world": {"device": "cpu"}}, gpus=("7",)))
    for found in (["GPU-xyz", "GPU-abc"], []):
        monkeypatch.setattr(preflight, "nvml_cards", lambda found=found: found)
        with pytest.raises(ConfigError) as caught:
            preflight.check_device(start({}, gpus=("2", "0", "12")))
        assert caught.value.key == "CUDA_VISIBLE_DEVICES" and ("2, 12" in caught.value.next_step) == bool(found)


def test_o5_a_redis_server_that_is_not_there() -> None:
    preflight.check_streams(start({"streams": {"backend": "redis"}}))
    for url, environ in (
        ("redis://127.0.0.1:1/0", {}),
        (None, {"PIPELINERL_REDIS_URL": "redis://:secret@127.0.0.1:1/0"}),
    ):
        with pytest.raises(UserError, match=r"redis://127\.0\.0\.1:1/0") as caught:
            preflight.check_streams(start({"streams": {"backend": "redis", "url": url}}, **environ))
        assert "secret" not in str(caught.value)


def test_vllm_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preflight.check_vllm(start({}))
    with monkeypatch.context() as missing:
        missing.setitem(sys.modules, "vllm", None)
        with pytest.raises(UserError, match="pip install"):
            preflight.check_vllm(start({}))
        preflight.check_vllm(start({"debug": {"mode": "finetune", "streams_from": "y"}}))
    (tmp_path / "vllm").mkdir()
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match="pip install"):
        preflight.check_vllm(start({}))


@pytest.mark.parametrize("words", [["dry_run=true"], []])
def test_without_vllm_a_plan_is_shown_and_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code = launch.main(["--config-name", "guessing", "world=cpu", f"output_dir={tmp_path / 'run'}", *words])
    assert code == (0 if words else 2)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("mode", ["", "open_loop", "actor", "preprocessor", "finetune"])
def test_options_that_servers_would_refuse_are_refused_where_there_are_servers(mode: str) -> None:
    """A trainer alone starts none: it may be given the configuration of an older run."""
    options = {"vllm_kwargs": {"compilation-config": {"cudagraph_mode": "FULL"}}}
    run = start({"debug": {"mode": mode, "streams_from": "y"}, "vllm_config": options})
    if mode == "finetune":
        preflight.check_servers(run)
        return
    with pytest.raises(ConfigError) as caught:
        preflight.check_servers(run)
    assert caught.value.got == "FULL"


def test_x5_variables_that_processes_do_not_get_are_named_once() -> None:
    environ = {"VLLM_PORT": "tcp://10.0.0.3:8000", "VLLM_API_KEY": "abc", "VLLM_CACHE_ROOT": "/c"}
    environ |= {"ACCELERATE_MIXED_PRECISION": "bf16", "FSDP_VERSION": "2"}
    servers, trainer = preflight.check_environment(start({}, **environ))
    assert "VLLM_API_KEY, VLLM_PORT:" in servers and "abc" not in servers
    assert "ACCELERATE_MIXED_PRECISION, FSDP_VERSION:" in trainer
    stage = {"debug": {"mode": "finetune", "streams_from": "y"}}
    assert preflight.check_environment(start(stage, **environ)) == [trainer]
    assert preflight.check_environment(start({}, VLLM_CACHE_ROOT="/c")) == []


@pytest.mark.parametrize(
    ("free_mib", "changes", "gpus", "environ", "is_refused"),
    [
        (64, {}, (), {}, False),  # Docker's default; the engine is the only worker
        (64, {}, ("0",), {}, False),
        (64, {}, (), {"VLLM_CPU_OMP_THREADS_BIND": "0-1"}, True),
        (64, {"world": {"device": "cpu"}}, ("0",), {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}, True),
        (64, {}, ("0",), {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}, False),
        (64, {"vllm_config": {"vllm_kwargs": {"tensor-parallel-size": 2}}}, ("0", "1"), {}, True),
        (64, {"vllm_config": {"vllm_kwargs": {"tensor-parallel-size": 2}}}, (), {}, True),
        (64, {"debug": {"mode": "finetune", "streams_from": "y"}}, (), {}, False),
        (64, {"vllm_config": {"vllm_kwargs": {"data_parallel_size": 2}}}, (), {}, True),
        (64, {"vllm_config": {"vllm_kwargs": {"numa-bind": ""}}}, (), {}, True),
        (242, {"vllm_config": {"vllm_kwargs": {"tensor-parallel-size": 2}}}, (), {}, False),
    ],
)
def test_x6_too_little_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
    free_mib: int,
    changes: dict[str, Any],
    gpus: tuple[str, ...],
    environ: dict[str, str],
    is_refused: bool,
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=free_mib * 2**20))
    with pytest.raises(ConfigError) if is_refused else nullcontext() as caught:
        assert preflight.check_server_files(start(changes, gpus=gpus, **environ)) == []
    assert caught is None or (caught.value.key, caught.value.got) == ("/dev/shm", "67.1 MB free")


def test_x6_no_folder_for_sockets() -> None:
    with pytest.raises(ConfigError) as caught:
        preflight.check_server_files(start({}, VLLM_RPC_BASE_PATH="/tmp/" + "x" * 90))
    assert caught.value.key == "VLLM_RPC_BASE_PATH"


@pytest.mark.parametrize(
    ("package", "section", "key", "value"),
    [("tensorboard", "tensorboard", "enabled", True), ("trackio", "tracking", "trackio_project", "p")],
)
@pytest.mark.parametrize("what_is_there", ["nothing", "a folder", "the package"])
def test_a_tracker_that_is_not_installed(
    what_is_there: str,
    package: str,
    section: str,
    key: str,
    value: object,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A folder with event files that is called like the package is not the package."""
    if what_is_there != "nothing":
        (tmp_path / package).mkdir()
    if what_is_there == "the package":
        (tmp_path / package / "__init__.py").touch()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, package, raising=False)
    preflight.check_tracking(start({}))
    enabled = start({section: {key: value}})
    with nullcontext() if what_is_there == "the package" else pytest.raises(ConfigError) as caught:
        preflight.check_tracking(enabled)
    assert caught is None or caught.value.key == f"{section}.{key}"


def test_a_sink_of_the_user_is_looked_for_without_importing_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import no_such_package\n\nclass MySink: ...\n")
    for path, near in (("mine.MySink", None), ("mine.MySnk", "mine.MySink"), ("elsewhere.MySink", "elsewhere")):
        run = replace(start({"tracking": {"sinks": [path]}}), search_dirs=[tmp_path])
        with pytest.raises(UserError, match=near) if near else nullcontext():
            preflight.check_tracking(run)


@pytest.mark.parametrize(
    ("quota", "most"), [("100000 100000", 1), ("150000 100000", 2), ("max 100000", 10**6), ("?", 10**6)]
)
def test_a_container_quota_limits_the_cores(tmp_path: Path, quota: str, most: int) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(quota + "\n")
    assert usable_cores(file) == min(most, len(os.sched_getaffinity(0)))
    assert usable_cores(tmp_path / "none") == len(os.sched_getaffinity(0))


MODULE = """
import json, os.path
try:
    from fast import load_quickly
except ImportError:
    def load_quickly(names): ...
if True:
    CONSTANT = 5
def load_problems(names): ...
async def generate_rollout(cfg, llm, problem, session): ...
@json.dumps
def wrapped(cfg): ...
def rewrapped(cfg): ...
rewrapped = json.dumps(rewrapped)
class Task:
    def method(self): ...
def local():
    variable = 1
raise RuntimeError("the file was run")
"""


def dry_run(folder: Path, **changes: Any) -> str:
    values = {
        "output_dir": str(folder / "out"),
        "model_path": str(folder / "model"),
        "dataset_loader": "dry_task.load_problems",
        "actor": {"rollout_policy": "dry_task.generate_rollout"},
    }
    made = start({**values, **changes})
    return check_dry_run(Start(made.config, made.cluster, {}, [folder], is_dry_run=True))


REFUSED = "\n- "  # the list of what speaks against a start


def test_a_dry_run_of_a_start_that_nothing_speaks_against(tmp_path: Path) -> None:
    save_model_folder(tmp_path / "model")
    (tmp_path / "dry_task.py").write_text(MODULE)
    assert REFUSED not in dry_run(tmp_path)
    assert not (tmp_path / "out").exists() and "dry_task" not in sys.modules


def test_a_dry_run_reports_every_fault_at_once(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    save_model_folder(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").unlink()
    (tmp_path / "model" / "tokenizer_config.json").unlink()
    (tmp_path / "dry_task.py").write_text(MODULE.replace("async ", ""))
    lines = dry_run(tmp_path, dataset_loader=None).splitlines()
    faults = [line for line in lines if line.startswith("- ")]
    keys = ["output_dir", "model_path", "dataset_loader", "actor.rollout_policy"]
    assert [fault.startswith(f"- {key}") for fault, key in zip(faults, keys, strict=False)] == [True] * 4


def test_a_dry_run_refuses_a_lag_policy_that_does_not_exist(tmp_path: Path) -> None:
    save_model_folder(tmp_path / "model")
    (tmp_path / "dry_task.py").write_text(MODULE + "class Bursts: ...\n")
    assert REFUSED not in dry_run(tmp_path, lag_policy="dry_task.Bursts") and "dry_task" not in sys.modules
    for name in ("adaptiv", "dry_task.Burst", "no_such_module.Bursts"):
        with pytest.raises(UserError, match=r"^lag_policy: got"):
            dry_run(tmp_path, lag_policy=name)


def test_a_dry_run_does_not_look_for_a_model_on_the_hub(tmp_path: Path) -> None:
    (tmp_path / "dry_task.py").write_text(MODULE)
    found = dry_run(tmp_path, model_path="nobody/nothing")
    assert REFUSED not in found and "nobody/nothing" in found
    assert REFUSED in dry_run(tmp_path, model_path="./nothing")


@pytest.mark.parametrize(
    ("path", "is_async", "said"),
    [
        ("static_names.load_problems", False, None),
        ("static_names.generate_rollout", True, None),
        ("static_names.load_quickly", False, None),
        ("static_names.CONSTANT", False, None),  # a start tells that it is no function
        ("static_names.wrapped", True, None),
        ("static_names.rewrapped", True, None),
        ("static_names.method", False, "'method'"),
        ("static_names.variable", False, "'variable'"),
        ("static_names.load_problem", False, "static_names.load_problems"),
        ("static_names.generate_rollot", True, "static_names.generate_rollout"),
        ("static_names.zzz", True, "'zzz'"),
        ("static_names.load_problems", True, "`async def`"),
        ("static_names.generate_rollout", False, "`def`"),
        ("static_names.inner.load", False, "'static_names.inner'"),
        ("no_such_module_here.load", False, "'no_such_module_here'"),
        ("load", False, ""),
        ("starred.anything", False, None),
        ("broken.load", False, "broken.py"),
        ("folder.inside.load", False, None),
        ("folder.other.load", False, "'folder.other'"),
        ("pipelinerl.domains.guessing.load_problems", False, None),
        ("pipelinerl.domains.no_such.load_problems", False, "'pipelinerl.domains.no_such'"),
        ("time.sleep", False, None),
    ],
)
def test_functions_are_found_in_the_text_of_their_file(
    tmp_path: Path, path: str, is_async: bool, said: str | None
) -> None:
    (tmp_path / "static_names.py").write_text(MODULE)
    (tmp_path / "starred.py").write_text("import sys\nfrom os import *\nsys.exit('the file was run')\n")
    (tmp_path / "broken.py").write_text("def load(:\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "inside.py").write_text("def load(names): ...\n")
    fault = function_fault(path, is_async, [tmp_path])
    assert fault is None if said is None else said in str(fault)


@pytest.mark.parametrize("key", ["dataset_loader", "actor.rollout_policy"])
def test_a_task_whose_file_is_named_like_one_of_python(tmp_path: Path, key: str) -> None:
    """It would hide that from every library."""
    (tmp_path / "statistics.py").touch()
    changes = {"dataset_loader": "mine.load", "actor": {"rollout_policy": "time.sleep"}}
    section, _, name = key.rpartition(".")
    (changes[section] if section else changes)[name] = "statistics.load"  # type: ignore[index]
    with pytest.raises(ConfigError) as caught:
        preflight.check_module_names(replace(start(changes), search_dirs=[tmp_path]))
    assert (caught.value.key, caught.value.got) == (key, "statistics.load")
    preflight.check_module_names(start(changes))


@pytest.mark.parametrize(
    ("finetune", "gpus", "wanted"),
    [
        # 2 of 10 states stay and one is being written; 10 models, in fp32 without a GPU.
        ({}, (), "training states 3 x 12.0 GB, models 10 x 4.0 GB, streams at most 5.6 GB"),
        ({"dtype": "bf16"}, (), "training states 3 x 12.0 GB, models 10 x 2.0 GB"),
        ({"lora": {"enabled": True}}, ("0",), "training states 3 x 0.0 MB, models 10 x 2.0 GB"),
        ({"keep_last_checkpoints": None}, (), "training states 10 x 12.0 GB"),
        ({"keep_intermediate_checkpoints": False, "keep_best": "success_rate"}, (), "models 5 x 4.0 GB"),
        ({"max_train_steps": 50}, (), "training states 1 x 12.0 GB, models 1 x 4.0 GB"),
    ],
)
def test_what_a_run_needs_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finetune: dict[str, Any], gpus: tuple[str, ...], wanted: str
) -> None:
    monkeypatch.setattr(preflight, "count_parameters", lambda path: 1_000_000_000)
    tuned = {"gradient_accumulation_passes": 8, "seq_length": 10_000, **finetune}
    changes = {"output_dir": str(tmp_path / "a" / "b"), "finetune": tuned}
    for free, notes in ((10**12, 0), (10**9, 1)):
        monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path, free=free: SimpleNamespace(free=free))
        line, *found = preflight.check_disk(start(changes, gpus=gpus))
        assert wanted in line and f"{free / 1e9:.1f} GB are free" in line and len(found) == notes


def test_parameters_are_counted_from_the_headers(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, tmp_path / "model-1.safetensors")
    save_file({"c": torch.zeros(2, 2, dtype=torch.bfloat16)}, tmp_path / "model-2.safetensors")
    assert count_parameters(str(tmp_path)) == 21
    # A second copy of the weights, which the index does not name, is no part of the model.
    (tmp_path / "consolidated.safetensors").write_bytes((tmp_path / "model-1.safetensors").read_bytes())
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-1.safetensors", "c": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert count_parameters(str(tmp_path)) == 21
    for damage in (b"", b"torn", (2).to_bytes(8, "little") + b"[]", (9).to_bytes(8, "little") + b'{"a": {}}'):
        (tmp_path / "model-1.safetensors").write_bytes(damage)
        assert count_parameters(str(tmp_path)) is None
    assert count_parameters("owner/name") is None


@pytest.mark.parametrize("is_dry_run", [False, True])
@pytest.mark.parametrize("source", ["weight files", "config.json", "name"])
def test_only_counted_weights_refuse_a_start(monkeypatch: pytest.MonkeyPatch, source: Any, is_dry_run: bool) -> None:
    """A formula may count layers that a model of another kind does not have."""
    shape = guess_shape("x/70b")
    assert shape is not None
    monkeypatch.setattr(preflight, "read_shape", lambda path: replace(shape, source=source))
    machine = replace(card_machine("H100", 80e9), host_bytes=10**12)
    monkeypatch.setattr(preflight, "machine_here", lambda config, cluster: machine)
    run = replace(start({}, gpus=("0", "1")), is_dry_run=is_dry_run)
    if source == "weight files":
        with pytest.raises(ConfigError):
            preflight.check_fit(run)
    else:
        assert sum(line.startswith("note: it may not fit") for line in preflight.check_fit(run)) == 2


def test_host_memory_is_that_of_the_nodes_with_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not that of the launcher's machine, which may be a small one without GPUs."""
    nodes = [
        ClusterNode("a", (), 1, None, 8e9),
        *(ClusterNode("h", ("0",), 1, 80 * 10**9, size) for size in (6e11, 4e11)),
    ]
    config = RunConfig.model_validate({"output_dir": "x", "world": {"num_actor_llms": 1, "num_finetune_ranks": 1}})
    seen: list[float] = []
    monkeypatch.setattr(preflight, "read_shape", lambda path: guess_shape("x/7b"))
    monkeypatch.setattr(preflight, "faults_of", lambda forecast: seen.append(forecast.machine.host_bytes) or [])
    cluster = Cluster(tuple(nodes))
    for known in (cluster, replace(cluster, nodes=(nodes[0], replace(nodes[1], host_bytes=5e11), nodes[2]))):
        preflight.check_fit(Start(config, known, {}))
        (rank,) = build_world_map(config, known, model=guess_shape("x/7b")).jobs_of("finetune")
        assert seen.pop() == known.nodes[rank.node_rank].host_bytes
    assert cluster.host_bytes([1, 2]) == 4e11 and cluster.host_bytes([0, 1, 2]) == 8e9
    assert Cluster((nodes[0], ClusterNode("h", (), 1))).host_bytes([0, 1]) is None


@pytest.mark.parametrize(
    ("name", "kwargs", "is_refused"),
    [
        ("x/7b", {"gpu-memory-utilization": 0.1}, True),  # 15.2 GB of weights
        ("x/7b", {"gpu-memory-utilization": 0.1, "kv-cache-memory-bytes": "4g"}, False),
        ("x/70b", {"kv-cache-memory-bytes": "4g"}, True),
        ("x/70b", {"cpu-offload-gb": 70}, False),  # 140 - 75.2 GB
        ("x/70b", {"cpu-offload-gb": 60}, True),
    ],
)
def test_weights_of_a_server_that_do_not_fit_its_gpu(name: str, kwargs: dict[str, Any], is_refused: bool) -> None:
    run, shape = start({"vllm_config": {"vllm_kwargs": kwargs}}, gpus=("0", "1")), guess_shape(name)
    assert shape is not None
    world = build_world_map(run.config, run.cluster, model=shape)
    faults = faults_of(forecast_run(run.config, world, replace(card_machine("H100", 80e9), host_bytes=10**12), shape))
    assert any(fault.key.endswith("tensor-parallel-size") for fault in faults) == is_refused
