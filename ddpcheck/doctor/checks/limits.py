"""The limits of the system: open files, processes, locked memory."""

from __future__ import annotations

from collections.abc import Iterator

from ddpcheck.doctor.context import DoctorContext
from ddpcheck.doctor.diagnosis import Diagnosis, Level
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.formatting import size_text

NAME = "limits"
_FEW_FILES, _SOME_FILES = 1024, 4096
_FEW_PROCESSES = 1024
_LITTLE_LOCKED = 64 << 20


def find(scene: DoctorContext) -> list[Diagnosis]:
    return scene.by_host(_look)


def _look(facts: Facts) -> list[Diagnosis]:
    if not facts.limits or facts.limits.get("error"):
        return []
    found = [*_files(facts), *_processes(facts), *_locked(facts)]
    return found or [Diagnosis(NAME, Level.OK, _line(facts))]


def _files(facts: Facts) -> Iterator[Diagnosis]:
    soft, hard = _limit(facts, "open_files")
    if soft is None or soft >= _SOME_FILES:
        return
    raised = "" if hard is None else f" (up to {hard} without an administrator)"
    yield Diagnosis(
        NAME,
        Level.WARNING if soft < _FEW_FILES else Level.NOTE,
        f"A process may open {soft} files.",
        "Data-loader workers pass every tensor as a file, and each connection is one: many workers or ranks fail "
        "with `Too many open files`.",
        f"Raise it before the job starts: `ulimit -n 65536`{raised}.",
    )


def _processes(facts: Facts) -> Iterator[Diagnosis]:
    soft, _ = _limit(facts, "processes")
    if soft is None or soft >= _FEW_PROCESSES or facts.limits.get("root"):
        return
    yield Diagnosis(
        NAME,
        Level.WARNING,
        f"The user may have {soft} processes and threads.",
        "Every rank and data-loader worker has threads for each processor; starting one too many fails.",
        "Raise it before the job starts (`ulimit -u`), or start fewer threads.",
    )


def _locked(facts: Facts) -> Iterator[Diagnosis]:
    """Only for what needs it: cards that read and write memory by themselves."""
    soft, _ = _limit(facts, "locked_memory")
    if soft is None or soft >= _LITTLE_LOCKED or not facts.infiniband:
        return
    yield Diagnosis(
        NAME,
        Level.WARNING,
        f"A process may lock {size_text(soft)} of memory, and there is InfiniBand.",
        "NCCL has to lock its buffers for it; it fails, or takes a slower way.",
        "Let the limit go (`ulimit -l unlimited`; `--ulimit memlock=-1` for a container).",
    )


def _limit(facts: Facts, name: str) -> tuple[int | None, int | None]:
    soft, hard = facts.limits.get(name) or (None, None)
    return soft, hard


def _line(facts: Facts) -> str:
    files, processes = _limit(facts, "open_files")[0], _limit(facts, "processes")[0]
    told = [f"{files or 'any number of'} open files", f"{processes or 'any number of'} processes"]
    return ", ".join(told)
