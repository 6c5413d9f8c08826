"""Memory of the machine, what of it this process may use, and the memory that processes share."""

from __future__ import annotations

import os
from typing import Any

from ddpcheck.doctor.facts.cgroup import memory_limit
from ddpcheck.sampling import cpu

SHARED = "/dev/shm"


def memory_facts() -> dict[str, Any]:
    """In bytes."""
    total = int(cpu.describe()["memory"])
    return {
        "total": total,
        "available": total - cpu.memory_used(),
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
