"""Puts all facts of this process together; a source that fails is written down and hides no other."""

from __future__ import annotations

import math
import os
import resource
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from ddpcheck.doctor.facts.identity import place, rank_numbers
from ddpcheck.doctor.facts.interpreter import interpreter_facts
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.privacy import allowed_environment
from ddpcheck.sampling import host, interfaces
from ddpcheck.sampling.infiniband import InfinibandPorts
from ddpcheck.sampling.nvml import Gpus

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
# The first version has no word for "no limit" but a number near the largest there is.
_NO_LIMIT = 1 << 60


def memory_limit(root: Path = _ROOT, own: Path = _OWN) -> int | None:
    """Bytes: the tightest limit on the way up."""
    found = [
        int(text)
        for folder in _folders("memory", root, own)
        for name in ("memory.max", "memory.limit_in_bytes")
        if (text := _text(folder / name)).isdecimal()
    ]
    least = min(found, default=None)
    return None if least is None or least >= _NO_LIMIT else least


def processor_limit(root: Path = _ROOT, own: Path = _OWN) -> float | None:
    """In whole processors' time: 1.5 is one and a half."""
    shares = [_share(folder) for folder in _folders("cpu", root, own)]
    least = min(shares, default=math.inf)
    return None if math.isinf(least) else round(least, 3)


def _share(folder: Path) -> float:
    words = _text(folder / "cpu.max").split()
    if not words:
        words = [_text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")]
    if len(words) != 2 or not all(word.isdecimal() for word in words) or not int(words[1]):
        return math.inf  # "max", or -1
    return int(words[0]) / int(words[1])


def _folders(controller: str, root: Path, own: Path) -> Iterator[Path]:
    """From the group of this process up to the root, for the second version and the first."""
    for line in _text(own).splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and controller not in controllers.split(","):
            continue
        top = root / controllers if controllers else root
        # Where a container shows only its own part of the tree, the path leads nowhere and the top remains.
        inside = Path(path.lstrip("/"))
        yield from (top / each for each in (inside, *inside.parents))


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def gpu_facts() -> dict[str, Any]:
    """What they are, how they are connected, and what they do at this moment."""
    gpus = Gpus()
    gpus.open()
    try:
        now = gpus.read()
        return {**gpus.describe(), "now": now}
    finally:
        gpus.close()


_LIMITS = {
    "open_files": resource.RLIMIT_NOFILE,
    "locked_memory": resource.RLIMIT_MEMLOCK,
    "processes": resource.RLIMIT_NPROC,
    "core": resource.RLIMIT_CORE,
}


def limit_facts() -> dict[str, Any]:
    """Soft and hard limit of each; None for no limit."""
    facts: dict[str, Any] = {name: [*map(_told, resource.getrlimit(of))] for name, of in _LIMITS.items()}
    facts["root"] = os.geteuid() == 0
    return facts


def _told(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


SHARED = "/dev/shm"


def memory_facts() -> dict[str, Any]:
    """In bytes."""
    total = int(host.describe()["memory"])
    return {
        "total": total,
        "available": total - host.memory_used(),
        "limit": memory_limit(),
        "shared": _shared(),
    }


def _shared() -> dict[str, Any]:
    try:
        room = os.statvfs(SHARED)
    except OSError as error:
        return {"error": error.strerror or str(error)}
    return {
        "total": room.f_blocks * room.f_frsize,
        "free": room.f_bavail * room.f_frsize,
        "writable": os.access(SHARED, os.W_OK),
    }


def name_facts(environ: Mapping[str, str]) -> dict[str, Any]:
    own = socket.gethostname()
    facts: dict[str, Any] = {"host": own, **_resolved(own)}
    master = environ.get("MASTER_ADDR", "")
    if master:
        facts["master"] = {"name": master, **_resolved(master)}
    return facts


def _resolved(name: str) -> dict[str, Any]:
    """Addresses in the resolver's order: the first that can be bound is the one that gloo takes."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return {"addresses": [], "reason": str(getattr(error, "strerror", None) or error)}
    addresses = list(dict.fromkeys(str(address[0]) for *_, address in found))
    return {"addresses": addresses, "own": [address for address in addresses if _can_bind(address)]}


def _can_bind(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as trying:
            trying.bind((address, 0))
    except OSError:
        return False
    return True


def processor_facts() -> dict[str, Any]:
    return {
        "all": os.cpu_count() or 0,
        # Which ones: ranks that are bound to processors of their own do not share them.
        "allowed": sorted(os.sched_getaffinity(0)),
        "quota": processor_limit(),
    }


_MOUNTS = "/proc/self/mounts"


def folder_facts(folder: Path) -> dict[str, Any]:
    """Of the folder itself, or of the nearest one above that is there."""
    there = folder.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    facts: dict[str, Any] = {"path": str(folder.absolute()), "kind": _file_system(there)}
    try:
        with tempfile.TemporaryDirectory(prefix=".ddpcheck-doctor-", dir=there) as trial:
            Path(trial, "file").write_bytes(b"written")
        room = os.statvfs(there)
    except OSError as error:
        return {**facts, "writable": False, "reason": f"{there}: {error.strerror or error}"}
    return {**facts, "writable": True, "free": room.f_bavail * room.f_frsize}


def _file_system(path: Path) -> str:
    """The kind of the mount that `path` lies in; empty where that is not told."""
    try:
        with open(_MOUNTS) as file:
            mounts = [line.split() for line in file]
    except OSError:
        return ""
    place = os.path.realpath(path)
    over = [row for row in mounts if len(row) > 2 and _is_below(place, row[1])]
    return max(over, key=lambda row: len(row[1]))[2] if over else ""


def _is_below(path: str, mount: str) -> bool:
    return mount == "/" or path == mount or path.startswith(f"{mount}/")


Section = dict[str, Any]


def collect(
    folder: Path,
    ask_torch: Callable[[], Section],
    injection: Callable[[], Section],
    python: Callable[[], Section] = interpreter_facts,
    environ: Mapping[str, str] = os.environ,
) -> Facts:
    """The facts of this process; those of torch and of the injection come by other ways on either side."""
    numbers = rank_numbers(environ)
    return Facts(
        host=os.uname().nodename,
        place=place(),
        rank=numbers["rank"],
        world_size=numbers["world_size"],
        local_rank=numbers["local_rank"],
        local_world_size=numbers["local_world_size"],
        python=_asked(python),
        torch=_asked(ask_torch),
        names=_asked(lambda: name_facts(environ)),
        interfaces=_listed(interfaces.describe),
        infiniband=_listed(lambda: InfinibandPorts().describe()),
        gpus=_asked(gpu_facts),
        limits=_asked(limit_facts),
        memory=_asked(memory_facts),
        processors=_asked(processor_facts),
        environment=allowed_environment(environ),
        folder=_asked(lambda: folder_facts(folder)),
        injection=_asked(injection),
    )


def _asked(source: Callable[[], Section]) -> Section:
    try:
        return source()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _listed(source: Callable[[], list[Section]]) -> list[Section]:
    try:
        return source()
    except (OSError, ValueError):
        return []
