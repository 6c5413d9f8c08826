"""Processors of the machine, and how many of them this process may use."""

from __future__ import annotations

import os
from typing import Any

from ddpcheck.doctor.facts.cgroup import processor_limit


def processor_facts() -> dict[str, Any]:
    return {
        "all": os.cpu_count() or 0,
        # Which ones: ranks that are bound to processors of their own do not share them.
        "allowed": sorted(os.sched_getaffinity(0)),
        "quota": processor_limit(),
    }
