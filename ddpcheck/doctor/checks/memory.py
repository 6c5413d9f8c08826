"""Memory that a job may use, where that is less than the machine has."""

from __future__ import annotations

from ddpcheck.doctor.context import DoctorContext
from ddpcheck.doctor.diagnosis import Diagnosis, Level
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.formatting import size_text

NAME = "memory"
_LITTLE = 1 << 30


def find(scene: DoctorContext) -> list[Diagnosis]:
    return scene.by_host(_look)


def _look(facts: Facts) -> list[Diagnosis]:
    memory = facts.memory
    total, available, limit = memory.get("total") or 0, memory.get("available") or 0, memory.get("limit")
    if not total:
        return []
    found = []
    if limit is not None and limit < total:
        found.append(
            Diagnosis(
                NAME,
                Level.NOTE,
                f"The container may use {size_text(limit)} of {size_text(total)}.",
                "All ranks and data-loader workers of this host together; who goes beyond it is killed without a word.",
                "Ask the scheduler or the container for more (`--mem`, `--memory`) if the job needs it.",
            )
        )
    if min(available, limit or available) < _LITTLE:
        found.append(
            Diagnosis(
                NAME,
                Level.WARNING,
                f"Only {size_text(min(available, limit or available))} of memory are left.",
                "Importing torch takes some hundred megabytes for every rank and data-loader worker.",
                "End what else runs here.",
            )
        )
    return found or [Diagnosis(NAME, Level.OK, f"{size_text(available)} of {size_text(total)} available")]
