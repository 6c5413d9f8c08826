"""Builds a lab of N hosts around a bridge, and always removes it."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.lab.host import Host
from tests.lab.network import LabError, ip, namespaces, plug, remove, write_names
from tests.lab.taps import tap_network

PREFIX = "ddpcheck-lab"
# Addresses for network benchmarks (RFC 2544), which no real network uses.
_NETWORK = "198.18.7"
_FURTHER = "198.19"
_OWNED = re.compile(rf"{PREFIX}-(\d+)-(\d+)-[-\w]+")
# A process may have several labs at a time.
_labs = itertools.count()


@dataclass(frozen=True)
class Ended:
    """Result of one host's command."""

    host: str
    status: int
    stdout: str
    stderr: str

    def __str__(self) -> str:
        return f"{self.host}: status {self.status}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


@dataclass(frozen=True)
class Lab:
    """Hosts that reach only each other."""

    hosts: tuple[Host, ...]

    def __getitem__(self, number: int) -> Host:
        return self.hosts[number]

    def run_all(
        self,
        command: Callable[[int, Host], Sequence[object]],
        *,
        env: Callable[[int, Host], Mapping[str, str]] | None = None,
        seconds: float = 400.0,
    ) -> list[Ended]:
        """Run one command on every host at the same time, as a scheduler would."""
        started = [
            (host, host.start(command(number, host), None if env is None else env(number, host)))
            for number, host in enumerate(self.hosts)
        ]
        deadline = time.monotonic() + seconds
        ended = []
        for host, process in started:
            try:
                stdout, stderr = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                _end(process)
                stdout, stderr = process.communicate()
                stderr += f"\n(stopped by the lab after {seconds:g} s)"
            ended.append(Ended(host.name, process.returncode, stdout, stderr))
        return ended


@cache
def missing() -> str:
    """Why no lab can be built here, and what helps; empty where one can."""
    if sys.platform != "linux":
        return "needs network namespaces, which only Linux has"
    if os.geteuid() != 0:
        return "needs root to make network namespaces: run the tests as root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "needs ip and tc: apt-get install iproute2"
    try:
        with make_lab(1, Path("/")) as lab:
            lab[0].limit_link(100)
            if lab[0].run(["hostname"]).stdout.strip() != lab[0].name:
                return "needs a UTS namespace, which cannot be made here (a container without CAP_SYS_ADMIN?)"
    except (OSError, LabError, subprocess.SubprocessError) as error:
        return f"needs network namespaces, which do not work here: {error}"
    return ""


@contextmanager
def make_lab(count: int, folder: Path, cards: Sequence[int] = ()) -> Iterator[Lab]:
    """`count` hosts named node0, node1, …, each with a folder of that name in `folder`.

    `cards`: speeds in Mbit/s of further networks, on which every host has an interface net0, net1, … that reports its
    speed.
    """
    sweep()
    stem = f"{PREFIX}-{os.getpid()}-{_started(os.getpid())}-{next(_labs)}"
    names = [f"{stem}-switch", *(f"{stem}-{number}" for number in range(count))]
    hosts: list[Host] = []
    try:
        for name in names:
            ip("netns", "add", name)
        hosts += _build(names[0], names[1:], folder)
        with ExitStack() as networks:
            for number, megabits in enumerate(cards):
                addresses = [f"{_FURTHER}.{number}.{host + 1}/24" for host in range(count)]
                networks.enter_context(tap_network(names[1:], f"net{number}", addresses, megabits))
            yield Lab(tuple(hosts))
    finally:
        for name in reversed(names):
            remove(name)
        for host in hosts:
            host.forget_processes()


def sweep() -> list[str]:
    """Remove labs whose test was killed before it could."""
    stale = [name for name in namespaces() if _is_stale(name)]
    for name in stale:
        remove(name)
    return stale


def _build(switch: str, namespaces: Sequence[str], folder: Path) -> Iterator[Host]:
    ip("-n", switch, "link", "add", "bridge", "type", "bridge")
    ip("-n", switch, "link", "set", "bridge", "up")
    named = [(f"{_NETWORK}.{number + 1}", f"node{number}") for number in range(len(namespaces))]
    for number, (namespace, (address, name)) in enumerate(zip(namespaces, named, strict=True)):
        plug(namespace, switch, f"port{number}", f"{address}/24")
        write_names(namespace, named)
        own_folder = folder / name if folder != Path("/") else folder
        own_folder.mkdir(parents=True, exist_ok=True)
        yield Host(name, address, own_folder, namespace, switch, f"port{number}")


def _is_stale(name: str) -> bool:
    owned = _OWNED.fullmatch(name)
    return owned is not None and _started(int(owned[1])) != int(owned[2])


def _started(pid: int) -> int:
    """Start time of a process in ticks since boot: a reused process id must not keep a lab alive."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def _end(process: subprocess.Popen[str]) -> None:
    """SIGTERM first, so that ddpcheck can stop its job."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
