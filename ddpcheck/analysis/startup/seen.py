"""What ranks said of their start, bounded however many files they read."""

from __future__ import annotations

from ddpcheck.records.schema import StartupRecord

MOST_RECORDS = 512


class StartupSeen:
    """Fed record by record."""

    def __init__(self) -> None:
        self.ranks: dict[int, list[StartupRecord]] = {}

    def add(self, rank: int, record: StartupRecord) -> None:
        said = self.ranks.setdefault(rank, [])
        if len(said) < MOST_RECORDS:
            said.append(record)
