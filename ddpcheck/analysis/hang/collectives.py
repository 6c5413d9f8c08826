"""The first collective in which the ranks of a job that hangs differ: not enqueued, mismatched, or not completed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ddpcheck.analysis.aggregate.agreement import groups_of, outlier_ranks
from ddpcheck.formatting import name_ranks
from ddpcheck.records.kinds.rank import GroupProgress

# All ranks pass tensors of equal sizes to these. Others, such as a gather, take different ones on the root.
_EQUAL_SIZES = frozenset({"all_reduce", "allreduce", "broadcast", "reduce", "all_reduce_coalesced"})

Progress = Mapping[str, GroupProgress]


class ConflictKind(str, Enum):
    MISSING = "missing"  # some ranks have not enqueued it
    MISMATCH = "mismatch"  # ranks enqueued different operations or sizes under one number
    INCOMPLETE = "incomplete"  # all ranks enqueued it, and none completed it


@dataclass(frozen=True)
class CollectiveConflict:
    """One collective of one process group, and the ranks that are at fault."""

    kind: ConflictKind
    group: str
    number: int
    ranks: tuple[int, ...]
    # What each rank enqueued under this number, and last before it; empty where it is not known.
    calls: Mapping[int, str]
    last: Mapping[int, str]

    @property
    def cause(self) -> str:
        what = f"collective {self.number} of process group {self.group}"
        if self.kind is ConflictKind.MISSING:
            others = sorted({call for rank, call in self.calls.items() if call and rank not in self.ranks})
            call = f" ({', '.join(others)})" if others else ""
            last = sorted({self.last[rank] for rank in self.ranks if self.last.get(rank)})
            after = f"; last: {', '.join(last)}" if last else ""
            return f"{name_ranks(self.ranks)} did not enqueue {what}{call}, all others did{after}"
        calls = "; ".join(
            f"{name_ranks(ranks)}: {call or 'unknown'}" for call, ranks in groups_of(self.calls)
        )
        if self.kind is ConflictKind.MISMATCH:
            return f"ranks enqueued different calls as {what}: {calls}"
        return f"all ranks enqueued {what}, and it did not complete: {calls}"

    @property
    def fix(self) -> str:
        if self.kind is ConflictKind.INCOMPLETE:
            return (
                "The calls match, so look at the transport: a lost link, a device error (dmesg, `NCCL_DEBUG=INFO`), "
                "or a rank that was killed. `ddpcheck links` measures every link."
            )
        return (
            "Call every collective on all ranks of its group, in the same order and with the same sizes: do not put it "
            "under conditions that depend on the rank or on its data."
        )

    def evidence(self) -> dict[str, Any]:
        """For report.json."""
        return {
            "kind": self.kind.value,
            "group": self.group,
            "number": self.number,
            "ranks": list(self.ranks),
            "calls": {str(rank): call for rank, call in sorted(self.calls.items()) if call},
            "last": {str(rank): call for rank, call in sorted(self.last.items()) if call},
        }


def find_conflict(ranks: Mapping[int, Progress]) -> CollectiveConflict | None:
    """The most certain conflict over all process groups. `ranks`: every rank whose progress is known."""
    conflicts: list[CollectiveConflict] = []
    for group in sorted({name for progress in ranks.values() for name in progress}):
        members = {rank: progress[group] for rank, progress in ranks.items() if group in progress}
        if len(members) > 1:
            for find in (_mismatch, _missing, _incomplete):
                conflict = find(group, members)
                if conflict is not None:
                    conflicts.append(conflict)
                    break
    order = list(ConflictKind)
    pending = [each for each in conflicts if each.kind is not ConflictKind.MISMATCH]
    certain = [each for each in conflicts if each.kind is ConflictKind.MISMATCH]
    return min(certain or pending, key=lambda each: order.index(each.kind), default=None)


def has_pending(progress: Progress) -> bool:
    """Whether a collective is enqueued and known not to be completed."""
    return any(each.completed is not None and each.completed < each.enqueued for each in progress.values())


def pending_operation(progress: Progress) -> str:
    """The first collective that has not completed, for messages; empty if there is none."""
    for name, each in sorted(progress.items()):
        if each.completed is not None and each.completed < each.enqueued:
            return f"{_call(each, each.completed + 1) or 'a collective'} (number {each.completed + 1} of group {name})"
    return ""


def _mismatch(group: str, members: Mapping[int, GroupProgress]) -> CollectiveConflict | None:
    numbers = [{int(row[0]) for row in _rows(each)} for each in members.values()]
    for number in sorted(set.intersection(*numbers)):
        signatures = groups_of({rank: _signature(each, number) for rank, each in members.items()})
        if len(signatures) > 1:
            return _conflict(
                ConflictKind.MISMATCH, group, number, outlier_ranks([r for _, r in signatures]), members
            )
    return None


def _missing(group: str, members: Mapping[int, GroupProgress]) -> CollectiveConflict | None:
    most = max(each.enqueued for each in members.values())
    behind = min(each.enqueued for each in members.values())
    if behind == most:
        return None
    ranks = tuple(sorted(rank for rank, each in members.items() if each.enqueued == behind))
    return _conflict(ConflictKind.MISSING, group, behind + 1, ranks, members)


def _incomplete(group: str, members: Mapping[int, GroupProgress]) -> CollectiveConflict | None:
    if not all(each.completed is not None and each.completed < each.enqueued for each in members.values()):
        return None
    number = min((each.completed or 0) + 1 for each in members.values())
    return _conflict(ConflictKind.INCOMPLETE, group, number, tuple(sorted(members)), members)


def _conflict(
    kind: ConflictKind, group: str, number: int, ranks: tuple[int, ...], members: Mapping[int, GroupProgress]
) -> CollectiveConflict:
    calls = {rank: _call(each, number) for rank, each in members.items()}
    return CollectiveConflict(
        kind, group, number, ranks, calls, {rank: _call(each, number - 1) for rank, each in members.items()}
    )


def _rows(progress: GroupProgress) -> Iterable[Sequence[Any]]:
    return (row for row in progress.recent if len(row) >= 3 and isinstance(row[0], int))


def _call(progress: GroupProgress, number: int) -> str:
    """Operation and sizes of one collective, for messages."""
    calls = [
        f"{row[1]} of {_size_text(row[2])}" if row[2] else str(row[1])
        for row in _rows(progress)
        if row[0] == number
    ]
    return ", ".join(calls[:2])


def _signature(progress: GroupProgress, number: int) -> str:
    rows = [row for row in _rows(progress) if row[0] == number]
    return repr([(row[1], row[2] if row[1] in _EQUAL_SIZES else None) for row in rows])


def _size_text(sizes: Any) -> str:
    each = ["x".join(map(str, size)) or "1" for size in sizes if isinstance(size, list)]
    return ", ".join(each) or "no elements"
