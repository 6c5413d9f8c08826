"""Records about other nodes of the job, exchanged through its store."""

from __future__ import annotations

from dataclasses import dataclass

from ddpcheck.records.registry import Record, record


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
