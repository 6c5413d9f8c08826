"""How each rank ended, from its own last words and from what its node's launcher saw."""

from __future__ import annotations

from collections.abc import Mapping

from ddpcheck.analysis.attempt import Attempt, Rank
from ddpcheck.analysis.result import RankStatus, RankSummary
from ddpcheck.analysis.run import NodeNotes

# Signals to a whole job land within this time of each other.
TOGETHER_SECONDS = 0.05


def summaries(attempt: Attempt, number: int, notes: NodeNotes, over: bool) -> tuple[RankSummary, ...]:
    """One row a rank, missing ones too. `over`: the command has ended."""
    statuses = _statuses(attempt, notes, over)
    rows = [_row(attempt, number, rank, statuses[rank]) for rank in sorted(attempt.ranks)]
    rows += [
        RankSummary(rank, RankStatus.MISSING, attempt=number, detail="never reported")
        for rank in sorted(expected_ranks(attempt) - attempt.ranks.keys())
    ]
    return tuple(sorted(rows, key=lambda row: row.rank))


def expected_ranks(attempt: Attempt) -> set[int]:
    """The ranks that should be in this folder: all, unless the job has nodes of which none reported here."""
    nodes = {rank.header.host for rank in attempt.ranks.values()}
    declared = max((_number(rank, "GROUP_WORLD_SIZE") for rank in attempt.ranks.values()), default=1)
    if declared <= len(nodes):
        return set(range(attempt.world_size))
    here: set[int] = set()
    for number, rank in attempt.ranks.items():
        local, size = rank.header.local_rank, _number(rank, "LOCAL_WORLD_SIZE")
        here.update(range(number - local, number - local + size) if local is not None else [number])
    return here


def _number(rank: Rank, name: str) -> int:
    try:
        return int(rank.header.environment.get(name, ""))
    except ValueError:
        return 1


def _statuses(attempt: Attempt, notes: NodeNotes, over: bool) -> Mapping[int, RankStatus]:
    statuses: dict[int, RankStatus] = {}
    silent: dict[int, float | None] = {}
    first_raise = float("inf")
    for number, rank in attempt.ranks.items():
        if rank.end is None and not any(fault.probe == "exit" for fault in rank.faults):
            silent[number] = notes.exits.get((rank.header.host, rank.header.pid))
        elif rank.end is not None and rank.end.error:
            # Once the job was told to stop, ranks that lose their partners may raise whatever they like.
            told = notes.stopped is not None and notes.stopped <= rank.end.time
            by_user = told or rank.end.error.startswith("KeyboardInterrupt")
            statuses[number] = RankStatus.STOPPED if by_user else RankStatus.RAISED
            first_raise = min(first_raise, rank.end.time)
        else:
            statuses[number] = RankStatus.FINISHED
    known = [when for when in silent.values() if when is not None]
    first_death = min(known, default=float("inf"))
    for number, when in silent.items():
        statuses[number] = _silent(when, first_death, first_raise, notes, over)
    return statuses


def _silent(
    when: float | None, first_death: float, first_raise: float, notes: NodeNotes, over: bool
) -> RankStatus:
    """A rank without last words: the first of them died, those that followed were stopped because of it."""
    if when is None:
        return (
            RankStatus.DIED
            if over and notes.stopped is None and first_raise == float("inf")
            else (RankStatus.STOPPED if over else RankStatus.RUNNING)
        )
    cause = min(first_raise, notes.stopped if notes.stopped is not None else float("inf"))
    if cause <= when or when > first_death + TOGETHER_SECONDS:
        return RankStatus.STOPPED
    return RankStatus.DIED


def _row(attempt: Attempt, number: int, rank: int, status: RankStatus) -> RankSummary:
    data = attempt.ranks[rank]
    detail = ""
    if data.end is not None and data.end.error:
        detail = data.end.error + (f" ({data.end.where})" if data.end.where else "")
    elif data.end is not None and data.end.dropped:
        detail = f"{data.end.dropped} records lost: the disk could not keep up"
    return RankSummary(
        rank=rank,
        status=status,
        attempt=number,
        host=data.header.host,
        pid=data.header.pid,
        local_rank=data.header.local_rank,
        device=data.header.device,
        steps=attempt.steps(rank),
        last_step=data.last.step if data.last is not None else None,
        last_stage=data.last.stage if data.last is not None else "",
        detail=detail,
    )
