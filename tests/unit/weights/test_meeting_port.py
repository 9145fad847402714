"""The port of a weight group: the planned one, or another if somebody holds it."""

from __future__ import annotations

import socket

import pytest
from fakes.ports import free_port

from pipelinerl.weights.meeting_port import listen
from pipelinerl.weights.transport import TransportName, create_transport


def test_the_planned_port_is_taken_if_it_is_free() -> None:
    port = free_port()
    for _ in range(2):
        with listen("127.0.0.1", port) as listening:
            assert listening.getsockname()[1] == port


@pytest.mark.parametrize(("name", "key"), [("gloo", "master_port"), ("ipc", "port")])
def test_a_server_that_joins_again_does_not_wait_for_the_port_of_its_broken_group(
    name: TransportName, key: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        planned = held.getsockname()[1]
        transport = create_transport(name, "127.0.0.1", planned, 60, 1024)
        told = transport.prepare(num_workers=1)
        assert told[key] != planned
        with socket.create_connection(("127.0.0.1", told[key]), timeout=60):
            pass
        transport.close()
