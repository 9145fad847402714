"""The port of a weight group: the planned one, or another if somebody holds it."""

from __future__ import annotations

import socket

from pipelinerl.weights.gloo_transport import GlooTransport
from pipelinerl.weights.meeting_port import listen


def test_the_planned_port_is_taken_if_it_is_free() -> None:
    with listen("127.0.0.1", None) as first:
        port = first.getsockname()[1]
    with listen("127.0.0.1", port) as again:
        assert again.getsockname()[1] == port


def test_a_server_that_joins_again_does_not_wait_for_the_port_of_its_broken_group() -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        planned = held.getsockname()[1]
        transport = GlooTransport("127.0.0.1", planned, timeout_s=5, chunk_bytes=1024)
        told = transport.prepare(num_workers=1)
        assert told["master_port"] != planned
        with socket.create_connection(("127.0.0.1", told["master_port"]), timeout=5):
            pass
        transport.close()
