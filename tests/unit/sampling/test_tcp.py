"""TCP statistics of real sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from ddpcheck.sampling import tcp
from ddpcheck.sampling import tcp as connections_module
from ddpcheck.sampling.tcp import ROUTE_FIELDS, Connection, Connections, dump_sockets, messages, parse

SIZE = 8 << 20


@contextlib.contextmanager
def pair(family: socket.AddressFamily = socket.AF_INET) -> Iterator[tuple[socket.socket, socket.socket]]:
    address = "127.0.0.1" if family is socket.AF_INET else "::1"
    with (
        socket.create_server((address, 0), family=family) as listener,
        socket.create_connection(listener.getsockname()[:2]) as sender,
        listener.accept()[0] as receiver,
    ):
        yield sender, receiver


def send(sender: socket.socket, receiver: socket.socket, pause: float = 0.0) -> None:
    thread = threading.Thread(target=sender.sendall, args=(bytes(SIZE),))
    thread.start()
    time.sleep(pause)
    left = SIZE
    while left:
        left -= len(receiver.recv(min(left, 1 << 16)))
    thread.join()


def seen(sender: socket.socket) -> Connection:
    logged = parse(dump_sockets()[os.fstat(sender.fileno()).st_ino])
    assert logged is not None
    assert logged.ports == (sender.getsockname()[1], sender.getpeername()[1])
    return logged


@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6], ids=["4", "6"])
def test_bytes_and_addresses(family: socket.AddressFamily) -> None:
    if family is socket.AF_INET6 and not os.path.exists("/proc/net/if_inet6"):
        pytest.skip("no IPv6 here")
    with pair(family) as (sender, receiver):
        send(sender, receiver)
        logged = seen(sender)
        assert logged.bytes in (SIZE, SIZE + 1)
        assert (logged.local, logged.remote) == (sender.getsockname()[0], receiver.getsockname()[0])
        assert logged.min_rtt > 0


def test_a_slow_receiver_is_not_a_slow_network() -> None:
    with pair() as (sender, receiver):
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        send(sender, receiver, pause=0.6)
        logged = seen(sender)
        assert logged.busy >= 500_000
        assert logged.receiver_limited + logged.buffer_limited >= 0.7 * logged.busy


def test_truncated_messages() -> None:
    assert list(messages(b"")) == []
    assert list(messages(struct.pack("=IHHII", 4, 20, 0, 1, 0))) == []
    assert parse(b"short") is None
    assert parse(bytes(72) + struct.pack("=HH", 8, 2) + bytes(4)) is None
    assert parse(bytes(72) + struct.pack("=HH", 0, 2)) is None


def connection(
    sent: int, busy: int = 0, limited: int = 0, remote: str = "10.0.0.2", min_rtt: int = 40
) -> Connection:
    return Connection("10.0.0.1", remote, (1, 9), sent, busy, limited, 0, min_rtt, 0)


class Kernel:
    """Fake kernel messages, one reading after the other; a body is the name of a connection."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found: dict[int, Connection] = {}
        self.held = {1: {11, 12}}
        monkeypatch.setattr(tcp, "dump_sockets", lambda: {inode: b"%d" % inode for inode in self.found})
        monkeypatch.setattr(tcp, "parse", lambda body: self.found[int(body)])
        monkeypatch.setattr(connections_module, "_sockets", lambda pid: self.held.get(pid, set()))
        monkeypatch.setattr(connections_module, "MIN_ROUTE_BYTES", 1)
        monkeypatch.setattr(connections_module, "MIN_INCREASE", 1)
        monkeypatch.setattr(connections_module, "MAX_CPU_SHARE", float("inf"))


PAIR = "10.0.0.1 10.0.0.2"


def test_totals_by_pair_of_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, source = Kernel(monkeypatch), Connections()
    kernel.found = {11: connection(100, 10), 12: connection(50, 8, limited=6), 13: connection(7, 7)}
    # Parallel connections share the link: bytes add up, times do not.
    assert source.read([1]) == {PAIR: [150, 10, 10, 0, 40, 2]}
    # A closed connection stays in the total.
    kernel.found = {11: connection(160, 15)}
    assert source.read([1]) == {PAIR: [210, 15, 15, 0, 40, 1]}
    kernel.held = {1: {14}}
    kernel.found = {14: connection(5, 1, min_rtt=30)}
    assert source.read([1]) == {PAIR: [215, 16, 16, 0, 30, 1]}
    # Also after all ranks have ended.
    kernel.found = {}
    assert source.read([]) == {PAIR: [215, 16, 16, 0, 30, 0]}
    assert len(ROUTE_FIELDS) == 6


def test_small_messages_do_not_make_a_link_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait in the queue behind gradients and transfer few bytes."""
    kernel, source = Kernel(monkeypatch), Connections()
    for reading in range(1, 5):
        kernel.found = {
            11: connection(1000 * reading, 100 * reading),
            12: connection(50 * reading, 400 * reading),
        }
        assert source.read([1]) == {PAIR: [1000 * reading, 100 * reading, 100 * reading, 0, 40, 2]}
    monkeypatch.setattr(connections_module, "MIN_INCREASE", 100)
    kernel.found = {11: connection(4010, 900), 12: connection(210, 5000)}
    assert source.read([1])[PAIR][:2] == [4000, 400]


def test_a_reused_inode(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, source = Kernel(monkeypatch), Connections()
    kernel.found = {11: connection(1000, 100)}
    source.read([1])
    kernel.found = {11: connection(200, 30)}
    assert source.read([1])[PAIR][:2] == [1200, 130]


def test_a_rank_that_is_added_late(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, source = Kernel(monkeypatch), Connections()
    kernel.found = {11: connection(100)}
    assert source.read([2]) == {}
    assert source.read([1, 2])[PAIR][0] == 100


def test_traffic_within_one_address_is_excluded(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, source = Kernel(monkeypatch), Connections()
    kernel.found = {11: connection(100, remote="10.0.0.1")}
    assert source.read([1]) == {}


def test_only_the_busiest_routes_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, source = Kernel(monkeypatch), Connections()
    monkeypatch.setattr(connections_module, "MIN_ROUTE_BYTES", 100)
    kernel.held = {1: set(range(5000))}
    kernel.found = {n: connection(n, remote=f"10.1.{n // 256}.{n % 256}") for n in range(5000)}
    kept = source.read([1])
    assert [row[0] for row in kept.values()] == list(range(4999, 4999 - connections_module.MAX_ROUTES, -1))


def test_expensive_readings_are_rare(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, source = Kernel(monkeypatch), Connections()
    kernel.found = {11: connection(100)}
    monkeypatch.setattr(connections_module, "MAX_CPU_SHARE", 1e-9)
    assert source.read([1]) != {}
    assert source.read([1]) == {}


def test_a_kernel_that_refuses_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def refuse() -> dict[int, bytes]:
        asked.append(1)
        raise OSError(93, "Protocol not supported")

    monkeypatch.setattr(tcp, "dump_sockets", refuse)
    source = Connections()
    assert (source.read([1]), source.read([1])) == ({}, {})
    assert len(asked) == 1


def test_without_ranks_no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "dump_sockets", lambda: pytest.fail("asked"))
    assert Connections().read([]) == {}
