"""What is refused before anything is written, and how many cores there are."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelinerl import launch
from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError, DomainError, UserError
from pipelinerl.run import preflight
from pipelinerl.run.machine import usable_cores
from pipelinerl.run.model_limits import check_context
from pipelinerl.world import Cluster, Job, WorldMap


def config(**changes: Any) -> RunConfig:
    return RunConfig.model_validate({"output_dir": "x", **changes})


def cluster(gpus: tuple[str, ...] = (), nodes: int = 1) -> Cluster:
    return Cluster(nodes, 0, "h", None, ("h",) * nodes, gpus, 1)


def world(*kinds: str) -> WorldMap:
    jobs = [Job(kind, f"{kind}_0", 0, 0, 0, "h", [], None, None, None, 1) for kind in kinds]
    return WorldMap(jobs, "cpu", 1, 0, 0, "h", 1)


@pytest.mark.parametrize(
    ("changes", "nodes", "key"),
    [
        ({"streams": {"backend": "redis"}}, 2, "streams.url"),
        ({"debug": {"mode": "actor"}}, 2, "debug.mode"),
        ({"debug": {"use_existing_llms": True}}, 1, "debug.use_existing_llms"),
        ({"supervise": {"max_restarts": 1}}, 2, "supervise.max_restarts"),
    ],
)
def test_what_cannot_be_run_is_refused(changes: dict[str, Any], nodes: int, key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        preflight.check_supported(config(**changes), cluster(nodes=nodes), {})
    preflight.check_supported(config(), cluster(), {})


@pytest.mark.parametrize(
    ("url", "environ"), [("redis://h:1/0", {}), (None, {"PIPELINERL_REDIS_URL": "redis://:secret@h:1/0"})]
)
def test_several_nodes_share_a_redis_server_that_the_user_names(url: str | None, environ: dict[str, str]) -> None:
    run = config(streams={"backend": "redis", "url": url})
    preflight.check_supported(run, cluster(nodes=2), environ)


def test_every_kind_of_job_of_a_plan_has_a_program() -> None:
    preflight.check_entrypoints(world("actor_llm", "preprocessor_llm", "actor", "preprocessor", "finetune"))


def test_devices_are_compared_with_the_machine() -> None:
    preflight.check_device(config(), cluster(("1", "GPU-abc")), lambda: ["GPU-xyz", "GPU-abc"])
    preflight.check_device(config(world={"device": "cpu"}), cluster(("7",)), list)
    with pytest.raises(ConfigError, match=r"indices below 2.*Remove 2, 12"):
        preflight.check_device(config(), cluster(("2", "0", "12")), lambda: ["GPU-xyz", "GPU-abc"])
    with pytest.raises(ConfigError, match="no NVIDIA driver"):
        preflight.check_device(config(), cluster(("0",)), list)


def test_a_redis_server_that_is_not_there() -> None:
    streams = {"backend": "redis", "url": "redis://127.0.0.1:1/0"}
    with pytest.raises(UserError, match="does not answer"):
        preflight.check_streams(config(streams=streams), {})
    preflight.check_streams(config(streams={"backend": "redis"}), {})
    with pytest.raises(UserError, match=r"redis://127\.0\.0\.1:1/0 does not answer.*PIPELINERL_REDIS_URL") as caught:
        preflight.check_streams(
            config(streams={"backend": "redis"}), {"PIPELINERL_REDIS_URL": "redis://:secret@127.0.0.1:1/0"}
        )
    assert "secret" not in str(caught.value)


def test_vllm_that_is_not_installed_is_named_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preflight.check_vllm(config())
    with monkeypatch.context() as missing:
        missing.setitem(sys.modules, "vllm", None)
        with pytest.raises(UserError, match=r"vLLM is not installed.*'\.\[gpu\]'.*'\.\[cpu\]'"):
            preflight.check_vllm(config())
        preflight.check_vllm(config(debug={"mode": "finetune", "streams_from": "y"}))
    (tmp_path / "vllm").mkdir()
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match="vLLM is not installed"):
        preflight.check_vllm(config())


@pytest.mark.parametrize("words", [["dry_run=true"], []])
def test_without_vllm_a_plan_is_shown_and_nothing_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    code = launch.main(["--config-name", "guessing", "world=cpu", f"output_dir={tmp_path / 'run'}", *words])
    assert code == (0 if words else 2)
    assert ("vLLM is not installed" in capsys.readouterr().err) == (not words)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("line", ["import os; os._exit(0)", "import sys; sys.exit(0)"])
def test_a_check_that_the_users_code_ends_is_no_success(tmp_path: Path, line: str) -> None:
    (tmp_path / "ending.py").write_text(
        f"def load_problems(names):\n    {line}\nasync def generate_rollout(cfg, llm, problem, session): ...\n"
    )
    run = config(
        dataset_loader="ending.load_problems",
        train_dataset_names=["a"],
        actor={"rollout_policy": "ending.generate_rollout"},
    )
    with pytest.raises(DomainError, match=r"dataset_loader ending\.load_problems.*sys\.exit\(\) or os\._exit"):
        preflight.check_domain(run, os.environ, [tmp_path])


def test_o5_the_users_code_does_not_see_the_secret_of_the_launchers(tmp_path: Path) -> None:
    (tmp_path / "looking.py").write_text(
        "import os\n"
        "def load_problems(names):\n    raise ValueError(f\"seen: {os.environ.get('PIPELINERL_NODE_SECRET')}\")\n"
        "async def generate_rollout(cfg, llm, problem, session): ...\n"
    )
    run = config(
        dataset_loader="looking.load_problems",
        train_dataset_names=["a"],
        actor={"rollout_policy": "looking.generate_rollout"},
    )
    with pytest.raises(UserError, match="seen: None"):
        preflight.check_domain(run, {**os.environ, "PIPELINERL_NODE_SECRET": "0123456789abcdef"}, [tmp_path])


def test_a_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json is missing"):
        preflight.check_model(config(model_path=str(tmp_path)))
    for missing in (str(tmp_path / "no"), "./no", "no such name", "a/b/c"):
        with pytest.raises(ConfigError, match="there is no such folder"):
            preflight.check_model(config(model_path=missing))


@pytest.mark.parametrize("model", [{"num_attention_heads": 9}, {"text_config": {"num_attention_heads": 9}}])
def test_workers_of_a_server_share_the_heads_evenly(tmp_path: Path, model: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))

    def check(size: int, model_path: str = str(tmp_path)) -> None:
        kwargs = {"vllm_kwargs": {"tensor_parallel_size": size}}
        preflight.check_parallel_size(config(model_path=model_path, vllm_config=kwargs))

    check(1)
    check(3)
    check(2, "somebody/on-the-hub")
    with pytest.raises(ConfigError, match=r"tensor-parallel-size: got 2, expected a divisor of 9.*Use one of 1, 3, 9,"):
        check(2)
    for other in ("{}", "no json"):
        (tmp_path / "config.json").write_text(other)
        check(2)


CONTEXTS: dict[str, tuple[dict[str, Any], int, bool]] = {
    "short": ({"max_position_embeddings": 1024}, 1025, True),
    "long enough": ({"max_position_embeddings": 1024}, 1024, False),
    "inside": ({"text_config": {"max_position_embeddings": 64}}, 65, True),
    "older name": ({"n_positions": 64}, 65, True),
    "plain rotation": ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "default"}}, 65, True),
    "stretched": ({"max_position_embeddings": 64, "rope_parameters": {"rope_type": "linear", "factor": 4}}, 256, False),
    "stretched, old form": ({"max_position_embeddings": 64, "rope_scaling": {"type": "linear"}}, 256, False),
    "by layers": ({"max_position_embeddings": 64, "rope_parameters": {"full": {"rope_type": "yarn"}}}, 65, False),
    "a length of its own": ({"max_position_embeddings": 64, "model_max_length": 128}, 128, False),
    "unknown": ({}, 10**6, False),
}


@pytest.mark.parametrize(("model", "asked", "is_refused"), CONTEXTS.values(), ids=CONTEXTS)
def test_a_context_longer_than_the_models_is_refused(
    model: dict[str, Any], asked: int, is_refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(model))
    kwargs: dict[str, Any] = {"max_model_len": asked}
    file = tmp_path / "config.json"

    def check(environ: dict[str, str] | None = None, config_file: Path | None = file) -> None:
        run = config(model_path=str(tmp_path), vllm_config={"vllm_kwargs": kwargs})
        check_context(run, config_file, environ or {})

    if is_refused:
        longest = asked - 1
        with pytest.raises(ConfigError, match=rf"max_model_len: got {asked}, expected at most {longest}, .*base_cpu"):
            check()
        with pytest.raises(ConfigError, match="max_model_len"):
            preflight.check_servers(config(model_path=str(tmp_path), vllm_config={"vllm_kwargs": kwargs}))
    else:
        check()
    check(config_file=None)
    check({"VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1"})
    kwargs["hf_overrides"] = '{"max_position_embeddings": 1000000}'
    check()


@pytest.mark.parametrize("mode", ["", "open_loop", "actor", "preprocessor", "finetune"])
def test_options_that_servers_would_refuse_are_refused_where_there_are_servers(mode: str) -> None:
    """A trainer alone starts none: it may be given the configuration of an older run."""
    options = {"compilation-config": {"cudagraph_mode": "FULL"}}
    run = config(debug={"mode": mode, "streams_from": "y"}, vllm_config={"vllm_kwargs": options})
    if mode == "finetune":
        preflight.check_servers(run)
        return
    with pytest.raises(ConfigError, match="cudagraph_mode: got 'FULL'"):
        preflight.check_servers(run)


@pytest.mark.parametrize("what_is_there", ["nothing", "a folder", "the package"])
def test_a_tracker_that_is_not_installed_is_refused(
    what_is_there: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with event files that is called like the package is not the package."""
    if what_is_there != "nothing":
        (tmp_path / "tensorboard").mkdir()
    if what_is_there == "the package":
        (tmp_path / "tensorboard" / "__init__.py").touch()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "tensorboard", raising=False)
    preflight.check_tracking(config())
    if what_is_there == "the package":
        preflight.check_tracking(config(tensorboard={"enabled": True}))
        return
    with pytest.raises(ConfigError, match=r"tensorboard.enabled: got True.*pip install pipelinerl\[tensorboard\]"):
        preflight.check_tracking(config(tensorboard={"enabled": True}))


@pytest.mark.parametrize(
    ("heads", "key_value_heads", "fitting"), [(12, 4, [1, 2, 4, 12]), (8, 1, [1, 2, 4, 8]), (9, 3, [1, 3, 9])]
)
def test_workers_of_a_server_share_or_repeat_the_heads_of_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, heads: int, key_value_heads: int, fitting: list[int]
) -> None:
    """Of a model in a folder, and of one that is in the cache of the hub."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"num_attention_heads": heads, "num_key_value_heads": key_value_heads}))
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, _: str(file))
    for model_path in (str(tmp_path), "somebody/on-the-hub"):
        for size in range(1, 17):
            run = config(model_path=model_path, vllm_config={"vllm_kwargs": {"tensor-parallel-size": size}})
            if size in fitting:
                preflight.check_parallel_size(run)
                continue
            with pytest.raises(ConfigError, match=f"Use one of {', '.join(map(str, fitting))}, or more servers"):
                preflight.check_parallel_size(run)


@pytest.mark.parametrize(
    ("quota", "most"), [("100000 100000", 1), ("150000 100000", 2), ("max 100000", 10**6), ("?", 10**6)]
)
def test_a_container_quota_limits_the_cores(tmp_path: Path, quota: str, most: int) -> None:
    file = tmp_path / "cpu.max"
    file.write_text(quota + "\n")
    assert usable_cores(file) == min(most, len(os.sched_getaffinity(0)))
    assert usable_cores(tmp_path / "none") == len(os.sched_getaffinity(0))
