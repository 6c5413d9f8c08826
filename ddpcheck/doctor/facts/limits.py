"""What the system lets this process have: open files, locked memory, processes, core dumps."""

from __future__ import annotations

import os
import resource
from typing import Any

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
