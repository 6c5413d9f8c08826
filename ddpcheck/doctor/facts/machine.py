"""Collects the facts of this process and its machine. A source that fails is recorded; the others are still read."""

from __future__ import annotations

import math
import os
import resource
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ddpcheck.doctor.facts.interpreter import interpreter_facts
from ddpcheck.doctor.facts.record import Facts, machine_id, rank_numbers
from ddpcheck.privacy import allowed_environment
from ddpcheck.sampling import host, interfaces
from ddpcheck.sampling.interfaces import InfinibandPorts
from ddpcheck.sampling.nvml import open_gpus

Section = dict[str, Any]

_CGROUP_ROOT = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")
# Version 1 of control groups writes "no limit" as a number near the largest integer.
_NO_LIMIT = 1 << 60
_MOUNTS = "/proc/self/mounts"
_SHARED_MEMORY = "/dev/shm"
_LIMITS = {
    "open_files": resource.RLIMIT_NOFILE,
    "locked_memory": resource.RLIMIT_MEMLOCK,
    "processes": resource.RLIMIT_NPROC,
    "core": resource.RLIMIT_CORE,
}


def collect(
    folder: Path,
    torch: Callable[[], Section],
    injection: Callable[[], Section],
    python: Callable[[], Section] = interpreter_facts,
    environ: Mapping[str, str] = os.environ,
) -> Facts:
    """The facts of this process. The launcher and the ranks get those of torch and of the injection differently."""
    numbers = rank_numbers(environ)
    return Facts(
        host=os.uname().nodename,
        place=machine_id(),
        rank=numbers["rank"],
        world_size=numbers["world_size"],
        local_rank=numbers["local_rank"],
        local_world_size=numbers["local_world_size"],
        python=_section(python),
        torch=_section(torch),
        names=_section(lambda: name_facts(environ)),
        interfaces=_section_list(interfaces.describe),
        infiniband=_section_list(lambda: InfinibandPorts().describe()),
        gpus=_section(gpu_facts),
        limits=_section(limit_facts),
        memory=_section(memory_facts),
        processors=_section(processor_facts),
        environment=allowed_environment(environ),
        folder=_section(lambda: folder_facts(folder)),
        injection=_section(injection),
    )


def _section(source: Callable[[], Section]) -> Section:
    try:
        return source()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _section_list(source: Callable[[], list[Section]]) -> list[Section]:
    try:
        return source()
    except (OSError, ValueError):
        return []


def name_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    own = socket.gethostname()
    facts: dict[str, Any] = {"host": own, **_resolved(own)}
    master = environ.get("MASTER_ADDR", "")
    if master:
        facts["master"] = {"name": master, **_resolved(master)}
    return facts


def _resolved(name: str) -> dict[str, Any]:
    """Addresses in resolver order. gloo binds to the first one that can be bound (`own`)."""
    try:
        results = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return {"addresses": [], "reason": str(getattr(error, "strerror", None) or error)}
    addresses = list(dict.fromkeys(str(address[0]) for *_, address in results))
    return {"addresses": addresses, "own": [address for address in addresses if _can_bind(address)]}


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trial:
            trial.bind((address, 0))
    except OSError:
        return False
    return True


def gpu_facts() -> dict[str, Any]:
    """Description, topology and current state of all GPUs."""
    gpus = open_gpus()
    try:
        now = gpus.read()
        return {**gpus.describe(), "now": now}
    finally:
        gpus.close()


def limit_facts() -> dict[str, Any]:
    """Soft and hard limit of each resource; None means no limit."""
    facts: dict[str, Any] = {name: [*map(_finite, resource.getrlimit(of))] for name, of in _LIMITS.items()}
    facts["root"] = os.geteuid() == 0
    return facts


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def memory_facts() -> dict[str, Any]:
    """Memory and shared memory, in bytes."""
    total = int(host.describe()["memory"])
    return {
        "total": total,
        "available": total - host.memory_used(),
        "limit": memory_limit(),
        "shared": _shared_memory(),
    }


def _shared_memory() -> dict[str, Any]:
    try:
        disk = os.statvfs(_SHARED_MEMORY)
    except OSError as error:
        return {"error": error.strerror or str(error)}
    return {
        "total": disk.f_blocks * disk.f_frsize,
        "free": disk.f_bavail * disk.f_frsize,
        "writable": os.access(_SHARED_MEMORY, os.W_OK),
    }


def processor_facts() -> dict[str, Any]:
    return {
        "all": os.cpu_count() or 0,
        # Indices rather than a count: ranks bound to different processors do not share them.
        "allowed": sorted(os.sched_getaffinity(0)),
        "quota": processor_limit(),
    }


def folder_facts(folder: Path) -> dict[str, Any]:
    """Of the folder, or of its nearest existing parent."""
    existing = folder.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    facts: dict[str, Any] = {"path": str(folder.absolute()), "kind": _file_system(existing)}
    try:
        with tempfile.TemporaryDirectory(prefix=".ddpcheck-doctor-", dir=existing) as trial:
            Path(trial, "file").write_bytes(b"written")
        disk = os.statvfs(existing)
    except OSError as error:
        return {**facts, "writable": False, "reason": f"{existing}: {error.strerror or error}"}
    return {**facts, "writable": True, "free": disk.f_bavail * disk.f_frsize}


def _file_system(path: Path) -> str:
    """File system type of the mount that holds `path`; empty if unknown."""
    try:
        with open(_MOUNTS) as file:
            mounts = [line.split() for line in file]
    except OSError:
        return ""
    resolved = os.path.realpath(path)
    containing = [row for row in mounts if len(row) > 2 and _is_below(resolved, row[1])]
    return max(containing, key=lambda row: len(row[1]))[2] if containing else ""


def _is_below(path: str, mount: str) -> bool:
    return mount == "/" or path == mount or path.startswith(f"{mount}/")


def memory_limit(root: Path = _CGROUP_ROOT, own: Path = _OWN_CGROUP) -> int | None:
    """The lowest memory limit of this control group and its parents, in bytes."""
    limits = [
        int(text)
        for folder in _cgroup_folders("memory", root, own)
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := _read_text(folder / name)).isdecimal()
    ]
    lowest = min(limits, default=None)
    return None if lowest is None or lowest >= _NO_LIMIT else lowest


def processor_limit(root: Path = _CGROUP_ROOT, own: Path = _OWN_CGROUP) -> float | None:
    """The lowest CPU quota, in processors: 1.5 is one and a half."""
    quotas = [_quota(folder) for folder in _cgroup_folders("cpu", root, own)]
    lowest = min(quotas, default=math.inf)
    return None if math.isinf(lowest) else round(lowest, 3)


def _quota(folder: Path) -> float:
    words = _read_text(folder / "cpu.max").split()
    if not words:
        words = [_read_text(folder / "cpu.cfs_quota_us"), _read_text(folder / "cpu.cfs_period_us")]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or not int(words[1]):
        return math.inf  # "max", or -1
    return int(words[0]) / int(words[1])


def _cgroup_folders(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """Folders from the control group of this process up to the root, for versions 2 and 1."""
    for line in _read_text(own).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controllers if controllers else root
        # In a container the path may not exist; then only the root is read.
        inside = Path(path.lstrip("/"))
        yield from (top / each for each in (inside, *inside.parents))


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
