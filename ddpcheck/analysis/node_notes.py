"""What launchers recorded about the ranks of a run: exits, signals, hangs and records that could not be written."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddpcheck.analysis.report import RankStatus, RankSummary
from ddpcheck.records.node_kinds import (
    HangRecord,
    HangState,
    LauncherFaultRecord,
    NodeLogReader,
    NodeRecord,
    NoHangWatchRecord,
    OrphanRecord,
    RankExitRecord,
    RendezvousRecord,
    SignalRecord,
    SlowRecord,
    StopRecord,
    UnwatchedRecord,
    WriteErrorRecord,
)

# Signals by which a user stops a job.
_STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
_NOTES = (
    RankExitRecord,
    SignalRecord,
    StopRecord,
    WriteErrorRecord,
    LauncherFaultRecord,
    OrphanRecord,
    HangRecord,
    SlowRecord,
    UnwatchedRecord,
    NoHangWatchRecord,
    RendezvousRecord,
)


@dataclass(frozen=True)
class WriteError:
    """A rank could not write its records."""

    rank: int
    text: str
    # Host and pid; None: the launcher did not record them.
    process: tuple[str, int] | None = None

    def is_of(self, rank: int, process: tuple[str, int]) -> bool:
        return self.rank == rank and self.process in (None, process)


@dataclass(frozen=True)
class FileLockWait:
    """A rank waits for a file lock: the process that holds it, and the file."""

    holder: int
    file: str


@dataclass
class Hang:
    """A launcher detected that no rank makes progress."""

    # Time without progress of any rank, and the state of each rank as its launcher classified it.
    seconds: float = 0.0
    states: dict[int, str] = field(default_factory=dict)
    # Ranks that did not answer: their last stack is out of date.
    silent: set[int] = field(default_factory=set)
    # The kernel function in which the training thread sleeps, by rank.
    sleeps_in: dict[int, str] = field(default_factory=dict)
    locks: dict[int, FileLockWait] = field(default_factory=dict)
    # When it was recorded, for a job that was not stopped; 0: not known.
    time: float = 0.0


@dataclass
class NodeNotes:
    """What the launchers of all nodes recorded."""

    # Time of exit by process (host, pid).
    exits: dict[tuple[str, int], float] = field(default_factory=dict)
    # The signal that ended a process, 0 for none. Missing where the launcher did not see it.
    signals: dict[tuple[str, int], int] = field(default_factory=dict)
    # Processes whose exit was noticed late: the recorded time is not the time of the exit.
    found_gone: set[tuple[str, int]] = field(default_factory=set)
    # When the user, or --fail-fast, stopped the job.
    stopped: float | None = None
    write_errors: list[WriteError] = field(default_factory=list)
    orphans: int = 0
    # Hosts by source that a launcher could not sample, and the error.
    unsampled: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    # Lines that a launcher could not write to its node log.
    unwritten: int = 0
    # Why processes were not watched, each with the name of one of them.
    unwatched: dict[str, str] = field(default_factory=dict)
    # Why hangs are not detected, and of which ranks; none: of all ranks of a launcher.
    no_hang_watch: dict[str, set[int]] = field(default_factory=dict)
    # The last time that ranks waited for others in `init_process_group`.
    rendezvous: RendezvousRecord | None = None
    # By session.
    hangs: dict[str, Hang] = field(default_factory=dict)
    # By session: the last time without progress in which some rank could go on by itself, so that the job was not
    # stopped.
    stalls: dict[str, Hang] = field(default_factory=dict)


def read_notes(
    path: Path, description: Mapping[str, Any], lines: Sequence[tuple[str, bytes]] = ()
) -> NodeNotes:
    """Read the node logs of a run. `description`: the contents of run.json; `lines`: what could not be written."""
    unwritten = description.get("unwritten")
    notes = NodeNotes(unwritten=unwritten if isinstance(unwritten, int) else 0)
    for _, record in NodeLogReader(path, lines).read(_NOTES):
        _add(notes, record)
    return notes


def _add(notes: NodeNotes, record: NodeRecord) -> None:
    match record:
        case RankExitRecord():
            process = (record.host, record.pid)
            notes.exits.setdefault(process, record.time)
            if record.signal is not None:
                notes.signals.setdefault(process, record.signal)
            if record.found_gone:
                notes.found_gone.add(process)
        case SignalRecord() if record.signal in _STOP_SIGNALS:
            notes.stopped = min(notes.stopped or record.time, record.time)
        case StopRecord():
            notes.stopped = min(notes.stopped or record.time, record.time)
        case WriteErrorRecord():
            known = record.host is not None and record.pid is not None
            process_or_none = (record.host or "", record.pid or 0) if known else None
            notes.write_errors.append(WriteError(record.rank, record.text, process_or_none))
        case LauncherFaultRecord() if record.probe == "sampler":
            hosts = notes.unsampled.setdefault((record.entry, record.error), set())
            hosts |= {record.host} if record.host is not None else set()
        case OrphanRecord():
            notes.orphans += 1
        case UnwatchedRecord():
            notes.unwatched.setdefault(record.why, record.name)
        case NoHangWatchRecord():
            notes.no_hang_watch.setdefault(record.why, set()).update(record.ranks)
        case RendezvousRecord():
            notes.rendezvous = record
        case HangRecord():
            hang = notes.hangs.setdefault(record.session, Hang())
            hang.seconds = max(hang.seconds, record.seconds)
            _add_states(hang, record.ranks)
        case SlowRecord() if record.details:
            # A later one replaces what is known of the ranks of its node.
            stall = notes.stalls.setdefault(record.session, Hang())
            stall.seconds, stall.time = record.seconds, max(stall.time, record.time)
            _add_states(stall, record.details)


def _add_states(hang: Hang, ranks: Mapping[str, HangState]) -> None:
    for text, state in ranks.items():
        if not text.isdigit():
            continue
        rank = int(text)
        hang.states[rank], hang.sleeps_in[rank] = state.state, state.sleeps_in
        hang.silent.discard(rank)
        hang.locks.pop(rank, None)
        if not state.answered:
            hang.silent.add(rank)
        if state.lock_holder:
            hang.locks[rank] = FileLockWait(state.lock_holder, state.lock_file)


def write_errors_by_attempt(
    errors: Iterable[WriteError], ranks: Sequence[Sequence[RankSummary]]
) -> list[dict[int, str]]:
    """For each attempt, the errors by rank. `ranks`: the rows of each attempt.

    A rank that wrote nothing at all is listed as missing: its error belongs to the first attempt in which it is.
    """
    assigned: list[dict[int, str]] = [{} for _ in ranks]
    for error in errors:
        matching = [n for n, rows in enumerate(ranks) if any(_is_of(error, row) for row in rows)]
        missing = [n for n, rows in enumerate(ranks) if any(_is_missing(error, row) for row in rows)]
        for number in matching or missing[:1] or [len(ranks) - 1]:
            assigned[number].setdefault(error.rank, error.text)
    return assigned


def _is_of(error: WriteError, row: RankSummary) -> bool:
    return row.status is not RankStatus.MISSING and error.is_of(row.rank, (row.host, row.pid))


def _is_missing(error: WriteError, row: RankSummary) -> bool:
    return row.status is RankStatus.MISSING and row.rank == error.rank
