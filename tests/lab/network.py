"""Network namespaces, the links between them and their speed, by `ip` and `tc`."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

RESOLVER_FOLDER = Path("/etc/netns")
# Length of the queue: a shorter one loses packets at once, a longer one hides the limit.
_QUEUE_MILLISECONDS = 50
_SMALLEST_BURST = 32_000


class LabError(RuntimeError):
    """A command that builds the lab failed."""


def ip(*words: str) -> str:
    return _must(["ip", *words])


def plug(host: str, switch: str, port: str, address: str) -> None:
    """Connect a host's eth0 to a port of the bridge."""
    ip("link", "add", "eth0", "netns", host, "type", "veth", "peer", "name", port, "netns", switch)
    ip("-n", switch, "link", "set", port, "master", "bridge", "up")
    ip("-n", host, "address", "add", address, "dev", "eth0")
    ip("-n", host, "link", "set", "eth0", "up")
    ip("-n", host, "link", "set", "lo", "up")


def limit(namespace: str, device: str, megabits: float | None) -> None:
    """Limit what a device sends; None: no limit."""
    queue = ["tc", "-n", namespace, "qdisc"]
    if megabits is None:
        if "tbf" in _must([*queue, "show", "dev", device]):
            _must([*queue, "del", "dev", device, "root"])
        return
    # About one millisecond of data, but at least one large packet of a veth.
    burst = max(_SMALLEST_BURST * 2, int(megabits * 1e6 / 8 / 1000))
    rate = ["rate", f"{megabits:g}mbit", "burst", str(burst), "latency", f"{_QUEUE_MILLISECONDS}ms"]
    _must([*queue, "replace", "dev", device, "root", "tbf", *rate])


def write_names(namespace: str, names: Sequence[tuple[str, str]]) -> None:
    """Write the file that `ip netns exec` shows as /etc/hosts, so that hosts resolve each other's names."""
    folder = RESOLVER_FOLDER / namespace
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for address, name in names)]
    (folder / "hosts").write_text("\n".join(lines) + "\n")
    # There is no name server, and a query would wait for a timeout.
    (folder / "nsswitch.conf").write_text("hosts: files\n")


def remove(namespace: str) -> None:
    """Remove a namespace and kill its processes; do nothing if it is gone."""
    for pid in _quietly(["ip", "netns", "pids", namespace]).split():
        try:
            os.kill(int(pid), signal.SIGKILL)
        except ProcessLookupError:
            continue
    _quietly(["ip", "netns", "del", namespace])
    shutil.rmtree(RESOLVER_FOLDER / namespace, ignore_errors=True)


def namespaces() -> list[str]:
    return [line.split()[0] for line in _quietly(["ip", "netns", "list"]).splitlines() if line.strip()]


def _must(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise LabError(f"{' '.join(command)}: {done.stderr.strip() or f'status {done.returncode}'}")
    return done.stdout


def _quietly(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
