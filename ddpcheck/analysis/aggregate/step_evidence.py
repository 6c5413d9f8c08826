"""Which steps were compared, and what is known about steps whose gradients were not digested.

Not every step is checked completely: `--every`, `--sketch-every` and the budget leave steps out. Rules use this to tell
"equal" from "not compared".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace

from ddpcheck.analysis.aggregate.rank_data import ModuleKey
from ddpcheck.records.kinds.gradients import AppliedRecord

# Steps between two comparisons of parameters whose windows are kept, for each module.
_MOST_WINDOWS = 256
# Records of a rank that are kept until parameters diverge. The files of ranks are read in turns.
_MOST_RECENT = 16
# How a rank's last backward ended, as records state it: DDP reduced it.
SYNCED = "synced"


class AppliedWindows:
    """Which backwards produced the gradients of steps whose gradients were not digested.

    Such a record has no digest, so it does not show whether gradients are equal. A rank writes one when it differs from
    its record before. Kept for steps after which parameters were not compared yet.
    """

    def __init__(self) -> None:
        # By module, then by step and optimizer: the records of ranks that wrote one.
        self._windows: dict[ModuleKey, dict[tuple[int, int], dict[int, AppliedRecord]]] = {}
        # By module, optimizer and rank: the latest records, digested or not.
        self._recent: dict[tuple[ModuleKey, int, int], deque[AppliedRecord]] = {}

    def add(self, module: ModuleKey, rank: int, record: AppliedRecord) -> None:
        recent = self._recent.get((module, record.optimizer, rank))
        if recent is None:
            recent = self._recent[module, record.optimizer, rank] = deque(maxlen=_MOST_RECENT)
        recent.append(record)
        if record.root:
            return
        windows = self._windows.setdefault(module, {})
        windows.setdefault((record.step, record.optimizer), {})[rank] = record
        if len(windows) > _MOST_WINDOWS:
            usual = next((key for key, known in windows.items() if _all_reduced(known)), None)
            del windows[(record.step, record.optimizer) if usual is None else usual]

    def forget(self, module: ModuleKey, step: int, optimizer: int) -> None:
        """All ranks have the same parameters after this step: earlier windows explain nothing."""
        windows = self._windows.get(module)
        if windows:
            for key in [key for key in windows if key[0] <= step and key[1] == optimizer]:
                del windows[key]

    def between(
        self, module: ModuleKey, optimizer: int, after: int, until: int
    ) -> list[tuple[int, Mapping[int, AppliedRecord]]]:
        """Step and records of each window after step `after`, up to step `until`, without digests."""
        windows = self._windows.get(module, {})
        return [
            (step, self._completed(module, step, optimizer, windows[step, owner]))
            for step, owner in sorted(windows)
            if owner == optimizer and after < step <= until
        ]

    def _completed(
        self, module: ModuleKey, step: int, optimizer: int, records: Mapping[int, AppliedRecord]
    ) -> dict[int, AppliedRecord]:
        """With ranks whose window did not change: it is that of their record before, if that is known."""
        completed = dict(records)
        for rank in module[0]:
            if rank not in completed:
                recent = self._recent.get((module, optimizer, rank), ())
                before = [record for record in recent if record.step < step]
                if before:
                    completed[rank] = replace(before[-1], step=step, root="", moved=False, nonfinite={})
        return dict(sorted(completed.items()))


def _all_reduced(records: Mapping[int, AppliedRecord]) -> bool:
    return all(record.last == SYNCED for record in records.values())
