"""Where trainer and server meet for a transfer group: the planned port, or a free one if that is taken.

A group that broke can hold its port until a call that is stuck in it ends; the server that joins again must not wait
for that. The server is told the port that was found.
"""

from __future__ import annotations

import errno
import logging
import socket

logger = logging.getLogger(__name__)


def listen(address: str, port: int | None) -> socket.socket:
    """A socket that listens at `address`, at `port` if it is free. OSError if the address is none of this machine."""
    if port:
        try:
            return socket.create_server((address, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            logger.warning("port %d of the weight group is in use: a free one is taken", port)
    return socket.create_server((address, 0))
