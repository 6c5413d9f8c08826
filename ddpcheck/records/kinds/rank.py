"""Records of a rank as a process: its header, faults, end, stacks on request, and comparison with other nodes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddpcheck.records.registry import SCHEMA, Record, record

# More than any job has.
MOST_RANKS = 1 << 17


@dataclass
class GroupProgress:
    """Collectives of one process group on one rank, by torch's own counters."""

    # Numbers of the last collective that was enqueued and of the last that completed; None: not known.
    enqueued: int = 0
    completed: int | None = None
    # The last collectives: [number, operation, sizes of the inputs, state]. Filled by the flight recorder only.
    recent: list[list[Any]] = field(default_factory=list)
    # The ranks of the group.
    ranks: list[int] = field(default_factory=list)

    def to_row(self) -> list[Any]:
        return [self.enqueued, self.completed, self.recent, self.ranks]

    @classmethod
    def from_row(cls, row: list[Any]) -> GroupProgress | None:
        """None if the row has another form."""
        match row:
            case [int(enqueued), int() | None as completed, list(recent), list(ranks), *_]:
                return cls(enqueued, completed, [each for each in recent if isinstance(each, list)], ranks)
        return None


@record("standing")
@dataclass(frozen=True)
class StackRecord(Record):
    """The stack of the training thread, on request of the launcher."""

    # Number of the request.
    look: int
    time: float
    # The innermost call first: [file, line, function]. No local variables.
    frames: list[list[Any]]
    # The optimizer step in progress, and the last hook event that a probe received.
    step: int = 0
    moment: str = ""
    # The training thread's id in the operating system.
    thread: int = 0
    # Collectives issued so far, by process group, where the backend counts them.
    collectives: dict[str, int] = field(default_factory=dict)
    # The rank has destroyed its process group.
    left: bool = False
    # Collectives enqueued and completed, by process group: a row of GroupProgress.
    groups: dict[str, list[Any]] = field(default_factory=dict)
    # What the training thread waits for, where its code proves it: an `Awaited`, and what identifies the object.
    awaits: list[Any] = field(default_factory=list)
    # The loops of the user's code around the current calls, innermost first: [file, function, first line, last line].
    loops: list[list[Any]] = field(default_factory=list)

    def progress(self) -> dict[str, GroupProgress]:
        rows = {name: GroupProgress.from_row(row) for name, row in self.groups.items()}
        return {name: row for name, row in rows.items() if row is not None}


@record("apart")
@dataclass(frozen=True)
class NodeMismatchRecord(Record):
    """The digest of a rank on another node, read from the job's store, differs from this rank's digest."""

    module: int
    stage: str
    of: str
    step: int
    root: str
    other_root: str
    other_rank: int
    other_host: str
    optimizer: int | None = None


@record("nodes")
@dataclass(frozen=True)
class NodesRecord(Record):
    """Hosts of the ranks that other launchers monitor, by rank."""

    others: dict[str, str]
    # At the end: number of digests that were compared with those of other nodes.
    compared: int = 0


_JOB_DIGITS = 16


def session_name(launch: str, job: str) -> str:
    """Combine two names of 32 digits. The part of the launch comes first: file names use the beginning."""
    return launch[:-_JOB_DIGITS] + job[-_JOB_DIGITS:]


def is_same_job(session: str, other: str) -> bool:
    return session[-_JOB_DIGITS:] == other[-_JOB_DIGITS:]


@record("rank")
@dataclass(frozen=True)
class RankHeader(Record):
    """First line of a file: identifies the rank that writes it."""

    rank: int
    world_size: int
    host: str
    pid: int
    # Start of the process in clock ticks since boot. Together with the pid it is unique on the host.
    ticks: int
    # Identical on all ranks of one launch of the job, different for every launch.
    session: str
    time: float
    local_rank: int | None = None
    restart: int = 0
    python: str = ""
    torch: str = ""
    backend: str = ""
    device: str = ""
    algorithm: str = ""
    argv: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    # The namespace in which `pid` counts.
    pid_namespace: str = ""
    schema: int = SCHEMA

    def is_possible(self) -> bool:
        """Analysis has a row for each rank of the job, also for those that never reported."""
        return 0 <= self.rank < self.world_size <= MOST_RANKS


@record("graph")
@dataclass(frozen=True)
class GraphRecord(Record):
    """What the job captured into graphs of its device, and replayed: totals so far. None of it is checked."""

    # Graphs with calls of DDP, `backward` or an optimizer, and these calls.
    captures: int = 0
    forwards: int = 0
    backwards: int = 0
    steps: int = 0
    # Replays of these graphs, and the calls that they repeat; 0 where replays cannot be counted.
    replays: int = 0
    replayed_backwards: int = 0
    replayed_steps: int = 0


@record("device")
@dataclass(frozen=True)
class DeviceRecord(Record):
    """A device that holds parameters of a module. A module on the CPU has none."""

    module: int
    device: str
    # The digest algorithm on this device: only digests of one algorithm can be compared.
    algorithm: str = ""
    # The backend of collectives on this device type.
    backend: str = ""
    name: str = ""
    # As `nvidia-smi -L` and `lspci` show them, without prefix; empty where torch does not say.
    uuid: str = ""
    pci: str = ""
    # What the device module of torch cannot do: "clock", "memory", "random", "capture".
    missing: list[str] = field(default_factory=list)


@record("fault")
@dataclass(frozen=True)
class FaultRecord(Record):
    """An internal error of ddpcheck: the probe that failed is switched off."""

    probe: str
    entry: str
    error: str
    where: str
    pid: int = 0
    # Only for processes without a record file, where the rank is known.
    rank: int | None = None


@record("end")
@dataclass(frozen=True)
class EndRecord(Record):
    """Last line of a file that was closed in an orderly way."""

    reason: str
    time: float
    error: str = ""
    where: str = ""
    # Records that were lost because the disk was too slow.
    dropped: int = 0
    # The rank had destroyed its process group before.
    left: bool = False
