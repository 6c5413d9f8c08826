"""The lab itself: hosts have names, reach each other at the speed of their links, and leave nothing behind."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab.lab import PREFIX, Lab, make_lab, sweep
from tests.lab.network import RESOLVER_FOLDER, ip, namespaces, remove

pytestmark = pytest.mark.needs("lab")

_SEND = """
import socket, sys
with socket.create_connection((sys.argv[1], 5000)) as connection:
    for _ in range(int(sys.argv[2])):
        connection.sendall(bytes(1 << 20))
    connection.shutdown(socket.SHUT_WR)
    connection.recv(1)
"""
_RECEIVE = """
import socket
with socket.create_server(("", 5000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    while connection.recv(1 << 20):
        pass
    connection.sendall(b"!")
"""


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Lab]:
    with make_lab(2, tmp_path) as hosts:
        yield hosts


def seconds_to_send(lab: Lab, megabytes: int, sender: int, receiver: int) -> float:
    listening = lab[receiver].start([sys.executable, "-c", _RECEIVE])
    assert listening.stdout is not None
    assert listening.stdout.readline() == "ready\n"
    started = time.monotonic()
    done = lab[sender].run([sys.executable, "-c", _SEND, lab[receiver].name, megabytes])
    assert done.returncode == 0, done.stderr
    return time.monotonic() - started


def test_hosts_have_their_own_names_addresses_and_folders(lab: Lab) -> None:
    for host in lab.hosts:
        assert host.run(["hostname"]).stdout.strip() == host.name
        assert f"inet {host.address}/24" in host.run(["ip", "-4", "address"]).stdout
        assert host.run(["pwd"]).stdout.strip() == str(host.folder)
    assert os.uname().nodename not in [host.name for host in lab.hosts]


def test_a_limit_applies_to_its_direction_and_can_be_removed(lab: Lab) -> None:
    lab[0].limit_sending(40)
    limited = seconds_to_send(lab, 8, sender=0, receiver=1)
    assert limited > 1.4  # 8 MB at 40 Mbit/s take 1.6 seconds
    backwards = min(seconds_to_send(lab, 8, sender=1, receiver=0) for _ in range(3))
    lab[0].limit_link(None)
    unlimited = min(seconds_to_send(lab, 8, sender=0, receiver=1) for _ in range(3))
    assert max(backwards, unlimited) < limited / 2


def test_nothing_is_left_when_a_test_fails(tmp_path: Path) -> None:
    built = make_lab(2, tmp_path)
    lab = built.__enter__()
    sleeper = lab[0].start(["sleep", "600"])
    names = [host.namespace for host in lab.hosts]
    # As `with` does when its body raises.
    assert not built.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert sleeper.returncode is not None
    assert not set(names) & set(namespaces())
    assert not any((RESOLVER_FOLDER / name).exists() for name in names)


def test_the_lab_of_a_killed_test_is_removed() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    stale, own = f"{PREFIX}-{gone.pid}-1-0", f"{PREFIX}-{os.getpid()}-1-0"
    ip("netns", "add", stale)
    try:
        sweep()
        assert stale not in namespaces()
        # A process id is not enough: the system may have reused it.
        ip("netns", "add", own)
        sweep()
        assert own not in namespaces()
    finally:
        remove(stale)
        remove(own)
