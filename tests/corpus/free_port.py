"""A port for ranks to meet at."""

from __future__ import annotations

import random
import socket


def free_port() -> int:
    """Below the ports that the system gives to clients: one of those could be taken again in between."""
    while True:
        port = random.SystemRandom().randint(20_000, 32_000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
