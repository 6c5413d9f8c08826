"""A free port for the store of a job."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Below the range of client ports: the system could assign one of those to another program meanwhile."""
    while True:
        port = random.SystemRandom().randint(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
