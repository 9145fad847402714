"""The plan of a run, row by row: the reference's machines, parallel servers, several nodes, few or no GPUs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
from fakes.decoder_shape import decoder_shape

from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.world import Cluster, ClusterMember, ClusterNode, Job, WorldMap, build_world_map, described_cluster
from pipelinerl.world import cluster as cluster_module
from pipelinerl.world.cluster import Card
from pipelinerl.world.model_shape import ModelShape

GIB = 2**30


SMALL, LARGE = decoder_shape(134_515_008, 30, 3, 64, 8192), decoder_shape(7_615_616_512, 28, 4, 128, 32768)


@dataclass
class CountingPorts:
    """Hands out every port once per node, without looking at the machine."""

    taken: set[tuple[int, int]] = field(default_factory=set)

    def take(self, node_rank: int, preferred: int, key: str) -> int:
        port = preferred
        while (node_rank, port) in self.taken:
            port += 1
        self.taken.add((node_rank, port))
        return port


def plan(
    gpus: int = 0,
    env: dict[str, str] | None = None,
    cores: int = 2,
    vllm_kwargs: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    model: ModelShape | None = None,
    gpu_gib: int | None = None,
    workers: int | str = "auto",
    **world: Any,
) -> WorldMap:
    config = RunConfig.model_validate(
        {
            "output_dir": "unused",
            "world": world,
            "schedule": "conventional" if world.get("placement") == "colocated" else "pipeline",
            "vllm_config": {"vllm_kwargs": vllm_kwargs or {}},
            "environment": environment,
            "actor": {"rollout_workers": workers},
        }
    )
    cards = [Card(f"GPU-{index}", "H100", (gpu_gib or 0) * GIB) for index in range(gpus)]
    with patch.object(cluster_module, "nvml_cards", lambda: cards):
        machine = ClusterNode.from_env(env or {}, cores)
    cluster = described_cluster(config.world, machine, ClusterMember.from_env(env or {}))
    return build_world_map(config, cluster, CountingPorts(), model)


def gpus_of(world: WorldMap, kind: str) -> str:
    jobs = world.jobs_of(kind)
    return " ".join((f"{job.node_rank}:" if job.node_rank else "") + ("+".join(job.gpus) or "-") for job in jobs)


TWO_NODES = {"WORLD_SIZE": "2", "MASTER_ADDR": "node-0"}
CACHE = "vllm_config.vllm_kwargs.kv-cache-memory-bytes"
H200: dict[str, Any] = {"gpu_gib": 140, "cores": 16}
ROWS: dict[str, tuple[dict[str, Any], str]] = {
    # name: (arguments of plan, GPUs of actor servers / reference servers / ranks); `1:2+3`: GPUs 2 and 3 of node 1
    "reference, 8 GPUs, 4:0:4": ({"gpus": 8}, "0 1 2 3 /  / 4 5 6 7"),
    "reference, 4 GPUs, 2:0:2": ({"gpus": 4, "actor_fraction": 2, "finetune_fraction": 2}, "0 1 /  / 2 3"),
    "base fractions on 4 GPUs": ({"gpus": 4}, "0 1 /  / 2 3"),
    "with reference servers, 4:2:2": (
        {"gpus": 8, "preprocessor_fraction": 2, "finetune_fraction": 2},
        "0 1 2 3 / 4 5 / 6 7",
    ),
    "a tiny share still gets one server": (
        {"gpus": 4, "actor_fraction": 10, "preprocessor_fraction": 0.1, "finetune_fraction": 10},
        "0 / 1 / 2 3",
    ),
    "TP=2 with dashes": ({"gpus": 8, "vllm_kwargs": {"tensor-parallel-size": 2}}, "0+1 2+3 /  / 4 5 6 7"),
    "TP=2, PP=2 with underscores": (
        {"gpus": 8, "vllm_kwargs": {"tensor_parallel_size": 2, "pipeline_parallel_size": "2"}},
        "0+1+2+3 /  / 4 5 6 7",
    ),
    "TP=3: whole servers only, the trainer gets the rest": (
        {"gpus": 8, "vllm_kwargs": {"tensor-parallel-size": 3}},
        "0+1+2 /  / 3 4 5 6 7",
    ),
    "explicit counts win": ({"gpus": 4, "num_actor_llms": 1, "num_finetune_ranks": 2}, "0 /  / 1 2"),
    "2 nodes of 4 GPUs": ({"gpus": 4, "env": TWO_NODES}, "0 1 2 3 /  / 1:0 1:1 1:2 1:3"),
    "unlike nodes": ({"nodes": [{"gpus": 1}, {"gpus": 3}]}, "0 1:0 /  / 1:1 1:2"),
    "unlike nodes, TP=2: a server goes where it fits": (
        {"nodes": [{"gpus": 1}, {"gpus": 4}], "vllm_kwargs": {"tensor-parallel-size": 2}, "num_actor_llms": 1},
        "1:0+1 /  / 0 1:2 1:3",
    ),
    "a node without GPUs has clients only": ({"nodes": [{"gpus": 0}, {"gpus": 2}]}, "1:0 /  / 1:1"),
    "2 nodes without GPUs": (
        {"nodes": [{"gpus": 0}, {"gpus": 0}], "num_actor_llms": 3, "num_finetune_ranks": 2},
        "1:- - 1:- /  / - 1:-",
    ),
    "2 nodes of 3 GPUs, TP=2: no server spans nodes": (
        {"gpus": 3, "env": TWO_NODES, "vllm_kwargs": {"tensor-parallel-size": 2}, "num_actor_llms": 2},
        "0+1 1:0+1 /  / 2 1:2",
    ),
    "1 GPU, shared": ({"gpus": 1, "placement": "colocated"}, "0 /  / 0"),
    "2 GPUs, shared": ({"gpus": 2, "placement": "colocated"}, "0 1 /  / 0 1"),
    "2 GPUs, shared by a parallel server": (
        {"gpus": 2, "placement": "colocated", "vllm_kwargs": {"tensor-parallel-size": 2}},
        "0+1 /  / 0 1",
    ),
    "4 GPUs, shared by parallel servers": (
        {"gpus": 4, "placement": "colocated", "vllm_kwargs": {"tensor-parallel-size": 2}},
        "0+1 2+3 /  / 0 1 2 3",
    ),
    "lists: two servers and a reference server on one GPU": (
        {
            "gpus": 2,
            "actor_gpus": [[0], [0]],
            "preprocessor_gpus": [[0]],
            "finetune_gpus": [1],
            "vllm_kwargs": {"kv-cache-memory-bytes": 1073741824},
        },
        "0 0 / 0 / 1",
    ),
    "lists: servers and a rank on a GPU of unknown size, with a share that the user chose": (
        {
            "gpus": 1,
            "actor_gpus": [[0], [0]],
            "finetune_gpus": [0],
            "vllm_kwargs": {"gpu_memory_utilization": 0.2},
        },
        "0 0 /  / 0",
    ),
    "lists: a server in turns with ranks": (
        {"gpus": 2, "actor_gpus": [[1]], "finetune_gpus": [0, 1], "placement": "colocated"},
        "1 /  / 0 1",
    ),
    "lists: places in CUDA_VISIBLE_DEVICES": (
        {"env": {"CUDA_VISIBLE_DEVICES": "7,5,3"}, "actor_gpus": [[2]], "finetune_gpus": [1, 0]},
        "3 /  / 5 7",
    ),
    "lists: a parallel server beside two ranks": (
        {"gpus": 4, "actor_gpus": [[3, 2]], "finetune_gpus": [0, 1], "vllm_kwargs": {"tensor-parallel-size": 2}},
        "3+2 /  / 0 1",
    ),
    "lists without GPUs only count": (
        {"device": "cpu", "gpus": 2, "actor_gpus": [[0], [0]], "preprocessor_gpus": [[5]], "finetune_gpus": [4, 5]},
        "- - / - / - -",
    ),
    "1 GPU carries servers and a rank": ({"gpus": 1, **H200, "model": SMALL}, "0 0 0 0 /  / 0"),
    "1 GPU, few cores": ({"gpus": 1, **H200, "model": SMALL, "cores": 8}, "0 0 /  / 0"),
    "1 GPU, one server": ({"gpus": 1, **H200, "model": SMALL, "servers_per_gpu": 1}, "0 /  / 0"),
    "1 GPU, a count of servers": ({"gpus": 1, **H200, "model": SMALL, "num_actor_llms": 2}, "0 0 /  / 0"),
    "1 GPU, alternating": ({"gpus": 1, **H200, "model": SMALL, "placement": "colocated"}, "0 0 0 0 /  / 0"),
    "2 GPUs, a small model": ({"gpus": 2, **H200, "model": SMALL}, "0 0 0 0 /  / 1"),
    "2 GPUs, a large model": ({"gpus": 2, **H200, "model": LARGE}, "0 /  / 1"),
    "2 GPUs, a count of servers": ({"gpus": 2, **H200, "model": SMALL, "num_actor_llms": 1}, "0 /  / 1"),
    "8 GPUs, a small model: servers go round the GPUs": (
        {"gpus": 8, **H200, "model": SMALL, "cores": 128, "actor_fraction": 2, "finetune_fraction": 6},
        "0 1 0 1 0 1 0 1 /  / 2 3 4 5 6 7",
    ),
    "8 GPUs, 16 cores": ({"gpus": 8, **H200, "model": SMALL}, "0 1 2 3 /  / 4 5 6 7"),
    "8 GPUs, two on each": (
        {"gpus": 8, "servers_per_gpu": 2, "model": SMALL, "gpu_gib": 80},
        "0 1 2 3 0 1 2 3 /  / 4 5 6 7",
    ),
    "3 servers, two on each": (
        {"gpus": 4, "servers_per_gpu": 2, "num_actor_llms": 3, "model": SMALL, "gpu_gib": 80},
        "0 1 0 /  / 2 3",
    ),
    "2 nodes, a small model": (
        {"gpus": 2, "env": TWO_NODES, "servers_per_gpu": 2, "model": SMALL, "gpu_gib": 80},
        "0 1 0 1 /  / 1:0 1:1",
    ),
    "reference servers are not multiplied": (
        {"gpus": 4, "servers_per_gpu": 2, "preprocessor_fraction": 2, **H200, "model": SMALL},
        "0 0 / 1 / 2 3",
    ),
    "lists are not multiplied": (
        {"gpus": 2, **H200, "model": SMALL, "servers_per_gpu": 4, "actor_gpus": [[0]], "finetune_gpus": [0]},
        "0 /  / 0",
    ),
    "0 GPUs": ({"gpus": 0}, "- /  / -"),
    "0 GPUs, several servers on each": ({"gpus": 0, "servers_per_gpu": 4}, "- /  / -"),
    "GPUs there, but device=cpu": ({"gpus": 2, "device": "cpu"}, "- /  / -"),
    "0 GPUs, 2 servers, 1 reference server, 2 ranks": (
        {"num_actor_llms": 2, "num_preprocessor_llms": 1, "num_finetune_ranks": 2},
        "- - / - / - -",
    ),
    "0 GPUs, a parallel server": ({"vllm_kwargs": {"tensor-parallel-size": 2}}, "- /  / -"),
    "CUDA_VISIBLE_DEVICES out of order": ({"gpus": 8, "env": {"CUDA_VISIBLE_DEVICES": "3,1"}}, "3 /  / 1"),
    "CUDA_VISIBLE_DEVICES as UUIDs": (
        {"env": {"CUDA_VISIBLE_DEVICES": "GPU-8932f937-d72c,GPU-1111"}},
        "GPU-8932f937-d72c /  / GPU-1111",
    ),
    "CUDA_VISIBLE_DEVICES as MIG ids": (
        {"env": {"CUDA_VISIBLE_DEVICES": "MIG-GPU-89/1/0, MIG-c6d4f1ef"}},
        "MIG-GPU-89/1/0 /  / MIG-c6d4f1ef",
    ),
    "12 devices": ({"gpus": 12, "actor_fraction": 10, "finetune_fraction": 2}, "0 1 2 3 4 5 6 7 8 9 /  / 10 11"),
    "CUDA_VISIBLE_DEVICES empty hides all": ({"gpus": 8, "env": {"CUDA_VISIBLE_DEVICES": ""}}, "- /  / -"),
    "CUDA_VISIBLE_DEVICES ends at -1": ({"gpus": 8, "env": {"CUDA_VISIBLE_DEVICES": "5,6,-1,7"}}, "5 /  / 6"),
}


@pytest.mark.parametrize(("arguments", "gpus"), ROWS.values(), ids=ROWS)
def test_o4_who_gets_which_gpus(arguments: dict[str, Any], gpus: str) -> None:
    world = plan(**arguments)
    ranks = gpus.rpartition("/")[2].split()
    kinds = ("actor_llm", "preprocessor_llm", "finetune")
    assert " / ".join(gpus_of(world, kind) for kind in kinds) == gpus
    assert world.num_finetune_ranks == len(ranks)
    assert world.device == ("cpu" if "-" in ranks else "cuda")
    assert len(world.jobs_of("actor")) == len(world.jobs_of("preprocessor")) == 1
    assert WorldMap.from_json(world.to_json()) == world
    addresses = [(job.node_rank, job.port) for job in world.jobs if job.port is not None]
    assert len(set(addresses)) == len(addresses)
    assert len({job.name for job in world.jobs}) == len(world.jobs)


def test_the_plan_of_an_older_start_is_read() -> None:
    """It has a field more for each job."""
    world = plan(gpus=2, cores=8)
    older = world.to_json().replace('"local_idx"', '"replica":0,"local_idx"')
    assert older.count("replica") == len(world.jobs) and WorldMap.from_json(older) == world


def test_a_server_and_a_rank_in_full() -> None:
    world = plan(gpus=2, cores=8)
    assert world.job("actor_llm_0") == Job(
        "actor_llm", "actor_llm_0", 0, 0, 0, "127.0.0.1", ["0"], 8080, "http://127.0.0.1:8080", 9000, 4
    )
    assert world.job("finetune_0") == Job("finetune", "finetune_0", 0, 0, 0, "127.0.0.1", ["1"], None, None, None, 4)
    assert (world.master_addr, world.master_port) == ("127.0.0.1", 29500)
    with pytest.raises(KeyError, match=r"actor_llm_7.*actor_llm_0"):
        world.job("actor_llm_7")


def test_two_nodes_have_addresses_local_ranks_and_a_master_with_the_trainer() -> None:
    world = plan(gpus=4, env={"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "10.0.0.1"})
    assert world.job("actor_llm_0").url == "http://node-0:8080"
    assert [job.local_idx for job in world.jobs_of("finetune")] == [0, 1, 2, 3]
    assert world.master_addr == "node-1"
    assert [job.name for job in world.jobs if job.node_rank] == [f"finetune_{rank}" for rank in range(4)]


def test_o4_ipv6_hosts_get_brackets() -> None:
    config = RunConfig.model_validate({"output_dir": "unused"})
    cluster = Cluster((ClusterNode("fd00::1", ("0",), 2), ClusterNode("fd00::2", ("0",), 2)))
    world = build_world_map(config, cluster, CountingPorts())
    assert world.job("actor_llm_0").url == "http://[fd00::1]:8080"
    assert world.job("finetune_0").host == "fd00::2"


def test_environments_and_verifiers() -> None:
    world = plan(environment={"_target_": "x.Y"}, env_replicas=2, verifier_replicas=1)
    assert [job.port for job in world.jobs_of("environment")] == [7777, 7778]
    assert [job.port for job in world.jobs_of("verifier")] == [7779]
    assert plan(env_replicas=2).jobs_of("environment") == []


def test_cores_are_shared_on_a_machine_without_gpus() -> None:
    world = plan(cores=9, num_actor_llms=2)
    assert [(job.name, job.cores) for job in world.jobs] == [
        ("actor_llm_0", 3),
        ("actor_llm_1", 3),
        ("actor_0", 1),
        ("preprocessor_0", 1),
        ("finetune_0", 3),
    ]


@pytest.mark.parametrize(
    ("changes", "workers"),
    [
        ({"gpus": 2, "cores": 32}, 1),
        ({"gpus": 2, "cores": 32, "actor_gpus": [[0]] * 4, "finetune_gpus": [1]}, 2),
        # 2 of actor and preprocessor, 1 of the rank, 8 of the servers
        ({"gpus": 2, "cores": 12, "actor_gpus": [[0]] * 4, "finetune_gpus": [1]}, 1),
        ({"gpus": 8, "cores": 64, "actor_fraction": 6, "finetune_fraction": 2}, 3),
        ({"gpus": 8, "cores": 8, "actor_fraction": 6, "finetune_fraction": 2}, 1),
        ({"gpus": 32, "cores": 256, "num_actor_llms": 24, "num_finetune_ranks": 8}, 8),
        # 2, 2 ranks, 4 x 2 of servers and 2 x 2 of reference servers
        ({"gpus": 8, "cores": 17, "num_actor_llms": 4, "num_preprocessor_llms": 2, "num_finetune_ranks": 2}, 1),
        ({"gpus": 8, "cores": 128, "num_actor_llms": 7, "num_finetune_ranks": 1, "workers": 5}, 5),
        ({"cores": 64, "num_actor_llms": 4}, 1),
        ({"cores": 2, "workers": 3}, 3),
    ],
)
def test_processes_that_run_rollouts(changes: dict[str, Any], workers: int) -> None:
    kwargs = {"kv-cache-memory-bytes": GIB} if "actor_gpus" in changes else None
    world = plan(vllm_kwargs=kwargs, gpu_gib=80, **changes)
    assert (world.job("actor_0").workers, world.job("actor_0").cores) == (workers, 1)
    chosen = workers > 1 and "workers" not in changes
    assert any(note.startswith(f"{workers} ") for note in world.notes) == chosen


# name: (arguments of plan, key of the error, numbers and names in it)
IMPOSSIBLE: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "a shared GPU without room": (
        {"gpus": 1, "placement": "colocated", "vllm_kwargs": {"gpu_memory_utilization": 0.9}},
        *("vllm_config.vllm_kwargs.gpu_memory_utilization", ("0.9", "0.85")),
    ),
    "a parallel server larger than the GPUs that it shares": (
        {"gpus": 2, "placement": "colocated", "vllm_kwargs": {"tensor-parallel-size": 4}},
        *("world", ("2 GPU(s)", "4 for")),
    ),
    "a listed GPU that does not exist": (
        {"gpus": 2, "actor_gpus": [[0]], "finetune_gpus": [1, 2]},
        *("world.finetune_gpus", ("0 to 1",)),
    ),
    "a listed server of another size": (
        {"gpus": 2, "actor_gpus": [[0]], "finetune_gpus": [1], "vllm_kwargs": {"tensor-parallel-size": 2}},
        *("world.actor_gpus", ("2 GPU(s)",)),
    ),
    "a shared GPU whose memory a server would measure": (
        {"gpus": 2, "actor_gpus": [[0], [0]], "finetune_gpus": [1]},
        *(CACHE, ("GPU 0",)),
    ),
    "two servers on one GPU, alternating with a rank": (
        {"gpus": 2, "actor_gpus": [[0], [0]], "finetune_gpus": [0], "placement": "colocated"},
        *(CACHE, ("GPU 0",)),
    ),
    "lists on several nodes": (
        {"gpus": 4, "env": TWO_NODES, "actor_gpus": [[0]], "finetune_gpus": [1]},
        *("world.actor_gpus", ("several nodes",)),
    ),
    "one GPU for two pools": ({"gpus": 1, "device": "cuda"}, "world", ("1 node(s) x 1 GPU", "world=auto")),
    "one GPU for three pools": (
        {"gpus": 1, "preprocessor_fraction": 1},
        *("world", ("1 for 1 actor servers", "1 for 1 reference servers")),
    ),
    "one GPU for a parallel server": (
        {"gpus": 1, **H200, "model": SMALL, "vllm_kwargs": {"tensor-parallel-size": 2}},
        *("world", ("2 for 1", "parallel size to 1")),
    ),
    "several servers on a GPU of unknown size": (
        {"gpus": 1, "model": SMALL, "servers_per_gpu": 2, "num_actor_llms": 2},
        *(CACHE, ("GPU 0",)),
    ),
    "one GPU, a trainer that fills it": (
        {"gpus": 1, "gpu_gib": 80, "cores": 16, "model": LARGE},
        *("world.servers_per_gpu", ("85.9 GB", "122.7 GB", "15.2 GB")),
    ),
    "more servers than fit": (
        {"gpus": 2, "gpu_gib": 24, "model": SMALL, "servers_per_gpu": 8},
        *("world.servers_per_gpu", ("8 x", "25.8 GB", "23.2 GB")),
    ),
    "several parallel servers on a GPU": (
        {"gpus": 4, "servers_per_gpu": 2, "vllm_kwargs": {"tensor-parallel-size": 2}},
        *("world.servers_per_gpu", ("2 GPUs",)),
    ),
    "lists of GPUs where there are none": ({"actor_gpus": [[0]], "finetune_gpus": [1]}, "world.device", ("auto",)),
    "no GPU but device=cuda": ({"device": "cuda"}, "world.device", ("cuda",)),
    "TP beyond a node": (
        {"gpus": 8, "env": TWO_NODES, "vllm_kwargs": {"tensor-parallel-size": 16}},
        *("world", ("16 for 1",)),
    ),
    "TP takes everything": (
        {"gpus": 4, "vllm_kwargs": {"tensor-parallel-size": 4}},
        *("world", ("4 for 1", "at least 1")),
    ),
    "explicit counts beyond the machine": (
        {"gpus": 4, "num_actor_llms": 3, "num_finetune_ranks": 2},
        *("world", ("3 for 3", "at least 2")),
    ),
    "more ranks than shared GPUs": (
        {"gpus": 2, "placement": "colocated", "num_finetune_ranks": 4},
        *("world.num_finetune_ranks", ("got 4", "at most 2")),
    ),
    "more servers than shared GPUs": (
        {"gpus": 4, "placement": "colocated", "num_actor_llms": 3, "vllm_kwargs": {"tensor-parallel-size": 2}},
        *("world.num_actor_llms", ("got 3", "at most 2")),
    ),
    "more servers than the only GPU may have": (
        {"gpus": 1, "servers_per_gpu": 2, "num_actor_llms": 3, "model": SMALL, **H200},
        *("world.num_actor_llms", ("got 3", "at most 2")),
    ),
    "TP beyond shared GPUs": (
        {"gpus": 2, "placement": "colocated", "vllm_kwargs": {"tensor-parallel-size": 4}},
        *("world", ("4 for 1", "parallel size")),
    ),
    "PP on CPUs": (
        {"vllm_kwargs": {"pipeline_parallel_size": 2}},
        *("vllm_config.vllm_kwargs.pipeline-parallel-size", ("2",)),
    ),
    "TP is no number": (
        {"gpus": 2, "vllm_kwargs": {"tensor-parallel-size": "two"}},
        *("vllm_config.vllm_kwargs.tensor-parallel-size", ("'two'",)),
    ),
    "one device twice": ({"env": {"CUDA_VISIBLE_DEVICES": "1,1"}}, "CUDA_VISIBLE_DEVICES", ("'1'",)),
    "no device id": ({"env": {"CUDA_VISIBLE_DEVICES": "cuda:0"}}, "CUDA_VISIBLE_DEVICES", ("'cuda:0'",)),
    "rank beyond the world": ({"env": {"WORLD_SIZE": "2", "RANK": "2"}}, "RANK", ("0 to 1",)),
    "world size is no number": ({"env": {"WORLD_SIZE": "many"}}, "WORLD_SIZE", ("'many'",)),
    "two nodes without an address": ({"env": {"WORLD_SIZE": "2"}}, "MASTER_ADDR", ("WORLD_SIZE=2",)),
    "a Ray cluster that nobody described": ({"cluster": "ray"}, "world.nodes", ("gpus",)),
    "unlike nodes, each too small": (
        {"nodes": [{"gpus": 3}, {"gpus": 2}], "vllm_kwargs": {"tensor-parallel-size": 4}},
        *("world", ("3, 2 GPUs", "4 for 1")),
    ),
}


@pytest.mark.parametrize(("arguments", "key", "words"), IMPOSSIBLE.values(), ids=IMPOSSIBLE)
def test_impossible_splits_explain_themselves(arguments: dict[str, Any], key: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        plan(**arguments)
    assert caught.value.key == key
    assert all(word in str(caught.value) for word in words)


def test_a_server_on_the_first_ranks_gpu_gets_its_weights_through_memory() -> None:
    shared = plan(gpus=2, placement="colocated")
    assert [shared.transport_to(job) for job in shared.jobs_of("actor_llm")] == ["ipc", "nccl"]
    parallel = plan(gpus=4, placement="colocated", vllm_kwargs={"tensor-parallel-size": 2})
    assert [parallel.transport_to(job) for job in parallel.jobs_of("actor_llm")] == ["ipc", "nccl"]
    cache = {"kv-cache-memory-bytes": 2**30}
    beside = plan(gpus=2, actor_gpus=[[0], [1]], finetune_gpus=[1, 0], vllm_kwargs=cache)
    assert [beside.transport_to(job) for job in beside.jobs_of("actor_llm")] == ["nccl", "ipc"]
    apart = plan(gpus=2)
    assert [apart.transport_to(job) for job in apart.jobs_of("actor_llm")] == ["nccl"]
    assert [plan().transport_to(job) for job in plan().jobs_of("actor_llm")] == ["gloo"]


def test_servers_that_share_a_gpu_have_a_fixed_cache() -> None:
    """By hand: (0.95 x 150.3 GB - a rank) / 4 - 0.27 GB - 3.2 GB is more than 256 sequences and a quarter need."""
    small = {"gpu_gib": 140, "cores": 16, "model": SMALL, "vllm_kwargs": {"max_model_len": 1024}}
    together = plan(gpus=1, **small).jobs_of("actor_llm")
    assert {job.cache_bytes for job in together} == {256 * 1024 * 30 * 2 * 3 * 64 * 2 * 5 // 4}
    assert {job.memory_share for job in together} == {0.0734}  # (7.55 + 0.27 + 3.22) GB of 150.3 GB
    assert {plan(gpus=1, **small).transport_to(job) for job in together} == {"ipc"}
    apart = plan(gpus=2, **small)
    # 0.9 of the GPU, divided by four.
    assert {job.cache_bytes for job in apart.jobs_of("actor_llm")} == {
        int(0.9 * 140 * GIB) // 4 - SMALL.parameters * 2 - 3 * GIB
    }
    assert {apart.transport_to(job) for job in apart.jobs_of("actor_llm")} == {"nccl"}
    alone = plan(gpus=2, **small, servers_per_gpu=1)
    assert [(job.cache_bytes, job.memory_share) for job in alone.jobs] == [(None, None)] * 4
    chosen = plan(gpus=1, **small | {"vllm_kwargs": {"kv_cache_memory_bytes": GIB, "gpu-memory-utilization": 0.3}})
    assert {(job.cache_bytes, job.memory_share) for job in chosen.jobs_of("actor_llm")} == {(GIB, 0.0304)}


def test_a_server_of_unknown_size_leaves_half_of_its_gpu_to_a_rank() -> None:
    (server,) = plan(gpus=1).jobs_of("actor_llm")
    assert (server.cache_bytes, server.memory_share) == (None, 0.5)
    (chosen,) = plan(gpus=1, vllm_kwargs={"gpu-memory-utilization": 0.7}).jobs_of("actor_llm")
    assert chosen.memory_share is None


def test_each_gpu_of_a_list_is_divided_among_its_own_servers() -> None:
    world = plan(gpus=2, actor_gpus=[[0], [0], [1]], finetune_gpus=[1], gpu_gib=80, model=SMALL)
    usable, fixed = int(0.9 * 80 * GIB), SMALL.parameters * 2 + 3 * GIB
    assert [job.cache_bytes for job in world.jobs_of("actor_llm")] == [
        *(usable // 2 - fixed, usable // 2 - fixed),
        256 * 8192 * 30 * 2 * 3 * 64 * 2 * 5 // 4,  # next to a rank no more than can be used
    ]


@pytest.mark.parametrize(
    ("arguments", "servers", "ranks"),
    [({"gpus": 1}, 4, 1), ({"gpus": 2}, 4, 0), ({"gpus": 2, "servers_per_gpu": 1}, 0, 0)],
)
def test_the_plan_says_what_it_decided(arguments: dict[str, Any], servers: int, ranks: int) -> None:
    world = plan(**arguments, **H200, model=SMALL)
    of_servers, of_actor = world.notes[:1], world.notes[1:]
    assert len(of_servers) == len(of_actor) == bool(servers)
    assert all(f"{servers} servers" in note and ("trainer" in note) == bool(ranks) for note in of_servers)
    assert all("2 processes" in note for note in of_actor)
