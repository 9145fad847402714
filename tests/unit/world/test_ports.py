"""Ports: free ones, never the same for two runs, and a clear refusal of a chosen one that is taken."""

from __future__ import annotations

import socket
import uuid
from typing import Any

import pytest
from fakes.ports import free_port

from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.world import FreePorts, scanned_ports
from pipelinerl.world import cluster as ports_module

CONFIG = RunConfig(output_dir="x")
CHOSEN = RunConfig.model_validate({"output_dir": "x", "world": {"llm_start_port": 18080}})


@pytest.fixture(autouse=True)
def busy(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Ports that cannot be bound on this machine; reservations are those of this test."""
    ports: set[int] = set()
    monkeypatch.setattr(ports_module, "RESERVED", f"\0{uuid.uuid4().hex}-")
    monkeypatch.setattr(ports_module, "can_bind", lambda port: port not in ports)
    return ports


def take(ports: FreePorts, *calls: tuple[int, int]) -> list[int]:
    return [ports.take(node, preferred, "world.llm_start_port") for node, preferred in calls]


def test_d4_a_port_is_handed_out_once_per_node_and_taken_ones_are_passed_over(busy: set[int]) -> None:
    busy.update((9001, 9002))
    with FreePorts(CONFIG) as ports:
        assert take(ports, (0, 9000), (0, 9000), (1, 9000), (1, 9000)) == [9000, 9003, 9000, 9001]


def test_d4_two_runs_at_the_same_moment_get_different_ports() -> None:
    with FreePorts(CONFIG) as first:
        assert take(first, (0, 8080), (0, 8080)) == [8080, 8081]
        with FreePorts(CONFIG) as second, FreePorts(CONFIG, reserve=False) as dry_run:
            assert take(second, (0, 8080), (0, 8080)) == [8082, 8083]
            assert take(dry_run, (0, 8080)) == [8080]
    with FreePorts(CONFIG) as third:
        assert take(third, (0, 8080)) == [8080]


@pytest.mark.parametrize(("config", "preferred"), [(CHOSEN, 18080), (CONFIG, 65500)])
def test_d4_a_chosen_port_that_is_taken_and_no_free_port_at_all(busy: set[int], config: Any, preferred: int) -> None:
    busy.update(range(18080, 65536))
    with FreePorts(config) as ports, pytest.raises(ConfigError) as caught:
        take(ports, (0, preferred))
    assert (caught.value.key, caught.value.got) == ("world.llm_start_port", preferred)


def test_ports_that_another_node_called_busy_are_passed_over_there(busy: set[int]) -> None:
    busy.update((7000, 18080, 18081, 29500))
    found = [port for port in scanned_ports(CHOSEN, 29500) if not ports_module.can_bind(port)]
    assert found == [18080, 18081, 29500]
    busy.clear()
    with FreePorts(CONFIG, busy_elsewhere={1: found}) as ports:
        assert take(ports, (1, 18080), (1, 18080), (0, 18080), (2, 18080)) == [18082, 18083, 18080, 18080]


def test_a_listening_port_is_not_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert not ports_module.can_bind(port)
    assert ports_module.can_bind(port)
