"""Records about the rank itself: the first line of a file, faults of ddpcheck, and the last line."""

from __future__ import annotations

from dataclasses import dataclass, field

from ddpcheck.records.registry import SCHEMA, Record, record


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
    schema: int = SCHEMA


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
