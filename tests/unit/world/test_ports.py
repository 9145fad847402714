"""Ports: free ones, never the same for two runs, and a clear refusal of a chosen one that is taken."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from fakes.ports import free_port

from pipelinerl.config import RunConfig
from pipelinerl.errors import ConfigError
from pipelinerl.world.ports import FreePorts, busy_ports, can_bind, chosen_port_keys


def test_a_port_is_handed_out_once_per_node() -> None:
    ports = FreePorts(probe=lambda port: True)
    assert [ports.take(0, 9000, "k") for _ in range(3)] == [9000, 9001, 9002]
    assert ports.take(1, 9000, "k") == 9000


def test_d4_taken_ports_are_passed_over_on_this_node_only() -> None:
    ports = FreePorts(rank=0, probe=lambda port: port > 9004)
    assert ports.take(0, 9000, "k") == 9005
    assert ports.take(1, 9000, "k") == 9000


def test_a_listening_port_is_not_free() -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        assert not can_bind(port)
    assert can_bind(port)


def test_d4_two_runs_at_the_same_moment_get_different_ports(tmp_path: Path) -> None:
    with FreePorts(lock_dir=tmp_path, probe=lambda port: True) as first:
        mine = [first.take(0, 8080, "k"), first.take(0, 8080, "k")]
        with FreePorts(lock_dir=tmp_path, probe=lambda port: True) as second:
            assert {second.take(0, 8080, "k"), second.take(0, 8080, "k")}.isdisjoint(mine)
    with FreePorts(lock_dir=tmp_path, probe=lambda port: True) as third:
        assert third.take(0, 8080, "k") == 8080


def test_d4_a_chosen_port_that_is_taken_is_refused() -> None:
    config = RunConfig.model_validate({"output_dir": "x", "world": {"llm_start_port": 18080}})
    assert chosen_port_keys(config) == {"world.llm_start_port"}
    ports = FreePorts(chosen=chosen_port_keys(config), probe=lambda port: port != 18081)
    assert ports.take(0, 18080, "world.llm_start_port") == 18080
    with pytest.raises(ConfigError, match=r"world.llm_start_port: got 18081.*another process uses it.*Choose another"):
        ports.take(0, 18081, "world.llm_start_port")


def test_d4_no_free_port_at_all() -> None:
    with pytest.raises(ConfigError, match="a free port from 65500 to 65535"):
        FreePorts(probe=lambda port: False).take(0, 65500, "k")


def test_ports_that_another_node_called_busy_are_passed_over_there() -> None:
    config = RunConfig.model_validate({"output_dir": "x", "world": {"llm_start_port": 18080}})
    busy = busy_ports(config, 29500, probe=lambda port: port not in (18080, 18081, 29500, 7000))
    assert busy == [18080, 18081, 29500]
    ports = FreePorts(probe=lambda port: True, busy_elsewhere={1: busy})
    assert [ports.take(1, 18080, "k"), ports.take(1, 18080, "k")] == [18082, 18083]
    assert (ports.take(0, 18080, "k"), ports.take(2, 18080, "k")) == (18080, 18080)
