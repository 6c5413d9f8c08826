"""Readings of a host from /proc, /sys and ioctl."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import pytest

from ddpcheck.sampling import host, interfaces
from ddpcheck.sampling import interfaces as interface_facts
from ddpcheck.sampling.host import RankProcesses, network_namespace
from ddpcheck.sampling.interfaces import InfinibandPorts

DEV = """\
Inter-|   Receive                                                |  Transmit
 face |bytes packets errs drop fifo frame compressed multicast|bytes packets errs drop fifo colls carrier compressed
    lo: 100 1 0 0 0 0 0 0 100 1 0 0 0 0 0 0
enp1s0f0:18446744073709551615 9 1 2 0 0 0 0 7 8 3 4 0 0 0 0
  odd: what
"""


def test_interfaces_are_read_by_column() -> None:
    assert interfaces.parse(DEV) == {
        "lo": [100, 100, 0, 0, 0, 0],
        "enp1s0f0": [18446744073709551615, 7, 1, 3, 2, 4],
    }


def test_bytes_over_loopback_are_counted() -> None:
    """At least the sent bytes: other processes may use the loopback too."""
    reading = interfaces.Interfaces()
    assert reading.read()["lo"][:2] == [0, 0]
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as one,
    ):
        other, _ = server.accept()
        with other:
            one.sendall(bytes(30_000))
            got = 0
            while got < 30_000:
                got += len(other.recv(65536))
    received, sent, *_ = reading.read()["lo"]
    assert received >= 30_000
    assert sent >= 30_000


def test_the_loopback_interface_is_classified() -> None:
    [loopback] = [row for row in interface_facts.describe() if row["name"] == "lo"]
    assert (loopback["class"], loopback["running"], loopback["speed"]) == ("loopback", True, None)
    assert "127.0.0.1/8" in loopback["addresses"]
    assert loopback["mtu"] == 65536


@pytest.mark.parametrize(
    ("driver", "speed", "believed"),
    [
        ("mlx5_core", 100000, 100000),
        ("virtio_net", None, None),
        ("veth", 10000, None),
        ("bridge", 10000, None),
        ("tun", 10000, None),
        ("tun", 10, None),
        ("tun", 25000, 25000),
    ],
)
def test_fictitious_speeds_are_ignored(driver: str, speed: int | None, believed: int | None) -> None:
    assert interface_facts.plausible_speed(driver, speed) == believed


def test_infiniband_counts_words_of_four_bytes(tmp_path: Path) -> None:
    port = tmp_path / "mlx5_0" / "ports" / "1"
    (port / "counters").mkdir(parents=True)
    reported = {"rate": "200 Gb/sec (4X HDR)", "state": "4: ACTIVE", "link_layer": "InfiniBand"}
    for name, text in reported.items():
        (port / name).write_text(text + "\n")
    counters = {"port_rcv_data": 1000, "port_xmit_data": 2000, "symbol_error": 3, "port_xmit_wait": 2**32 - 5}
    for name, value in counters.items():
        (port / "counters" / name).write_text(f"{value}\n")
    ports = InfinibandPorts(tmp_path)
    assert ports.describe() == [
        {"name": "mlx5_0/1", "speed": 200_000, "state": "ACTIVE", "layer": "InfiniBand"}
    ]
    assert ports.read() == {"mlx5_0/1": [0, 0, 0, 0]}
    (port / "counters" / "port_rcv_data").write_text("1010\n")
    (port / "counters" / "symbol_error").write_text("4\n")
    (port / "counters" / "port_xmit_wait").write_text("15\n")  # it wraps at 32 bits
    assert ports.read() == {"mlx5_0/1": [40, 0, 1, 20]}


def test_no_infiniband(tmp_path: Path) -> None:
    ports = InfinibandPorts(tmp_path / "none")
    assert (ports.describe(), ports.read()) == ([], {})


def test_processor_and_memory_use() -> None:
    share = host.Cpu()
    until = time.monotonic() + 0.2
    while time.monotonic() < until:
        pass
    assert 0 < share.read() <= 100
    facts = host.describe()
    assert 0 < host.memory_used() < facts["memory"]
    assert facts["cpus"] == os.cpu_count()


def test_a_rank_is_read_until_it_exits() -> None:
    ranks = RankProcesses()
    child = subprocess.Popen(["sleep", "60"])
    ranks.add(3, os.getpid())
    ranks.add(4, child.pid)
    logged = ranks.read()
    assert sorted(logged) == ["3", "4"]
    pid, resident, *storage = logged["3"]
    assert pid == os.getpid()
    assert resident > 1 << 20
    assert len(storage) == 2
    child.kill()
    child.wait()
    assert sorted(ranks.read()) == ["3"]


def test_a_restarted_rank_replaces_the_old_process() -> None:
    ranks = RankProcesses()
    ranks.add(0, 2**22 + 5)  # no such process
    ranks.add(0, os.getpid())
    assert ranks.read()["0"][0] == os.getpid()


def test_network_namespace_ids() -> None:
    assert network_namespace() == network_namespace(os.getpid()) != ""
    assert network_namespace(2**22 + 5) == ""
