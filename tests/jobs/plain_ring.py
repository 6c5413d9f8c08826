"""One host of a ring AllReduce over plain sockets, with the traffic that gloo has for DDP, and the kernel's counters.

Prints one line of JSON: the readings of the host's own connections, and the milliseconds per step.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import threading
import time

from ddpcheck.sampling.tcp import Connections

PORT = 5000
EVERY = 0.4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hosts", type=int)
    parser.add_argument("--number", type=int)
    parser.add_argument("--bytes", type=int, default=1 << 20)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--pace", type=float, default=0.03)
    parser.add_argument("--late", type=float, default=0.0)
    options = parser.parse_args()
    to, back = _neighbours(options.number, options.hosts)
    readings: list[tuple[float, dict[str, list[int]]]] = []
    over = threading.Event()
    reader = threading.Thread(target=_read, args=(readings, over))
    reader.start()
    began = time.monotonic()
    for _ in range(options.steps):
        time.sleep(options.pace + options.late)
        _all_reduce(to, back, options.bytes, options.hosts)
    took = time.monotonic() - began
    over.set()
    reader.join()
    print(json.dumps({"readings": readings, "step": 1000 * took / options.steps}), flush=True)
    time.sleep(0.5)  # until the neighbours have received everything


def _neighbours(number: int, hosts: int) -> tuple[socket.socket, socket.socket]:
    """Connections to the previous host, as in gloo's ring, and from the next one."""
    with socket.create_server(("", PORT)) as server:
        to = None
        while to is None:
            try:
                to = socket.create_connection((f"node{(number - 1) % hosts}", PORT))
            except OSError:
                time.sleep(0.05)
        back, _ = server.accept()
    for each in (to, back):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return to, back


def _all_reduce(to: socket.socket, back: socket.socket, size: int, hosts: int) -> None:
    """Two segments per host, each sent when the neighbour has asked for it."""
    pieces, piece = 4 * (hosts - 1), size // hosts // 2
    sender = threading.Thread(target=_send, args=(to, pieces, bytes(piece)))
    sender.start()
    back.sendall(b"!!")
    for number in range(pieces):
        _receive(back, piece)
        if number < pieces - 2:
            back.sendall(b"!")
    sender.join()


def _send(to: socket.socket, pieces: int, piece: bytes) -> None:
    for _ in range(pieces):
        _receive(to, 1)
        to.sendall(piece)


def _receive(connection: socket.socket, count: int) -> None:
    while count:
        got = len(connection.recv(min(count, 1 << 18)))
        if not got:
            raise SystemExit("the neighbour closed its connection")
        count -= got


def _read(readings: list[tuple[float, dict[str, list[int]]]], over: threading.Event) -> None:
    source = Connections()
    while not over.wait(EVERY):
        readings.append((time.time(), source.read([os.getpid()])))


if __name__ == "__main__":
    main()
