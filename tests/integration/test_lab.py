"""The lab itself: hosts have names, reach each other at the speed they are given, and leave nothing behind."""

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


def test_hosts_have_names_addresses_and_folders_of_their_own(lab: Lab) -> None:
    for host in lab.hosts:
        assert host.run(["hostname"]).stdout.strip() == host.name
        assert f"inet {host.address}/24" in host.run(["ip", "-4", "address"]).stdout
        assert host.run(["pwd"]).stdout.strip() == str(host.folder)
    assert os.uname().nodename not in [host.name for host in lab.hosts]


def test_a_limit_holds_in_its_direction_and_goes_again(lab: Lab) -> None:
    lab[0].limit_sending(40)  # 8 MB then take 1.6 seconds
    assert seconds_to_send(lab, 8, sender=0, receiver=1) > 1.4
    assert seconds_to_send(lab, 8, sender=1, receiver=0) < 1.4
    lab[0].limit_link(None)
    assert seconds_to_send(lab, 8, sender=0, receiver=1) < 1.4


def test_nothing_stays_behind_when_a_test_fails(tmp_path: Path) -> None:
    built = make_lab(2, tmp_path)
    lab = built.__enter__()
    sleeper = lab[0].start(["sleep", "600"])
    names = [host.namespace for host in lab.hosts]
    # What a `with` does where its body raises.
    assert not built.__exit__(ZeroDivisionError, ZeroDivisionError(), None)
    assert sleeper.returncode is not None
    assert not set(names) & set(namespaces())
    assert not any((RESOLVER_FOLDER / name).exists() for name in names)


def test_a_lab_whose_test_was_killed_is_swept_away() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    stale, own = f"{PREFIX}-{gone.pid}-1-0", f"{PREFIX}-{os.getpid()}-1-0"
    ip("netns", "add", stale)
    try:
        sweep()
        assert stale not in namespaces()
        # The number of a process is not enough: it may have been given to another one since.
        ip("netns", "add", own)
        sweep()
        assert own not in namespaces()
    finally:
        remove(stale)
        remove(own)
