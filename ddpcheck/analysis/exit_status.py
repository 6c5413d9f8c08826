"""How each rank ended, from its own last words and from what its node's launcher saw."""

from __future__ import annotations

import re
from collections.abc import Mapping
from signal import SIGABRT, SIGBUS, SIGFPE, SIGHUP, SIGILL, SIGINT, SIGKILL, SIGSEGV, SIGTERM

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import RankData
from ddpcheck.analysis.report import RankStatus, RankSummary
from ddpcheck.analysis.run_reader import NodeNotes

# Signals to a whole job land within this time of each other.
TOGETHER_SECONDS = 0.05
VANISH_SECONDS = 2.0
# What launchers end the other ranks with once one has died.
_POLITE = (SIGTERM, SIGINT, SIGHUP)
# What no rank brings upon itself because another one has gone, as it may SIGABRT.
_HARD = (SIGKILL, SIGSEGV, SIGBUS, SIGILL, SIGFPE)
# What ends a process from within: after its farewell that is a crash while Python shuts down.
_CRASH: dict[int, str] = {
    SIGABRT: "SIGABRT",
    SIGSEGV: "SIGSEGV",
    SIGBUS: "SIGBUS",
    SIGILL: "SIGILL",
    SIGFPE: "SIGFPE",
}
# What gloo, NCCL, MPI and the stores say when the other end of a connection has gone. Whoever says so is not
# where the trouble began.
_LOST_A_PARTNER = re.compile(
    r"connection (?:was )?(?:closed|reset|aborted)|broken pipe|failed to recv, got 0 bytes|socket closed"
    r"|ncclRemoteError|remote process exited|peer (?:has )?(?:closed|exited|is dead)",
    re.IGNORECASE,
)
# A launcher that catches its ranks' exceptions leaves no more than this of them.
_NO_REASON = re.compile(r"exit status \d+")


def summaries(attempt: Attempt, number: int, notes: NodeNotes, over: bool) -> tuple[RankSummary, ...]:
    """One row a rank, missing ones too. `over`: the command has ended."""
    statuses = _statuses(attempt, notes, over)
    rows = [_row(attempt, number, rank, statuses[rank], notes) for rank in sorted(attempt.ranks)]
    rows += [
        RankSummary(rank, RankStatus.MISSING, attempt=number, detail="never reported")
        for rank in sorted(expected_ranks(attempt) - attempt.ranks.keys())
    ]
    return tuple(sorted(rows, key=lambda row: row.rank))


def expected_ranks(attempt: Attempt) -> set[int]:
    """The ranks that should be in this folder: all, unless the job has nodes of which none reported here."""
    nodes = {rank.header.host for rank in attempt.ranks.values()}
    if len(nodes) == 1 and attempt.elsewhere:
        return set(range(attempt.world_size)) - attempt.elsewhere.keys()
    declared = max((_number(rank, "GROUP_WORLD_SIZE") for rank in attempt.ranks.values()), default=1)
    if declared <= len(nodes):
        return set(range(attempt.world_size))
    here: set[int] = set()
    for number, rank in attempt.ranks.items():
        local, size = rank.header.local_rank, _number(rank, "LOCAL_WORLD_SIZE")
        here.update(range(number - local, number - local + size) if local is not None else [number])
    return here


def lost_a_partner(error: str) -> bool:
    """Whether a rank fails because another one has gone, whatever became of that."""
    return bool(_LOST_A_PARTNER.search(error))


def crash_at_exit(rank: RankData, notes: NodeNotes) -> str:
    """The signal that ended a process which had done its work and said goodbye; empty for none."""
    if rank.end is None or rank.end.error:
        return ""
    return _CRASH.get(notes.signals.get(_process(rank), 0), "")


def _number(rank: RankData, name: str) -> int:
    try:
        return int(rank.header.environment.get(name, ""))
    except ValueError:
        return 1


def _statuses(attempt: Attempt, notes: NodeNotes, over: bool) -> Mapping[int, RankStatus]:
    statuses: dict[int, RankStatus] = {}
    silent: dict[int, float | None] = {}
    first_raise = first_reason = float("inf")
    for number, rank in attempt.ranks.items():
        if rank.end is None and not _was_muted(number, rank, notes):
            silent[number] = notes.exits.get(_process(rank))
        elif rank.end is not None and rank.end.error:
            # Once the job was told to stop, ranks that lose their partners may raise whatever they like.
            told = notes.stopped is not None and notes.stopped <= rank.end.time
            by_user = told or rank.end.error.startswith("KeyboardInterrupt")
            statuses[number] = RankStatus.STOPPED if by_user else RankStatus.RAISED
            # A rank that died before anybody watched it is found gone only after the others have complained,
            # and its parent may have taken its signal away: then nothing but their words tells the order.
            if not lost_a_partner(rank.end.error):
                first_raise = min(first_raise, rank.end.time)
                if not _NO_REASON.fullmatch(rank.end.error):
                    first_reason = min(first_reason, rank.end.time)
        else:
            statuses[number] = RankStatus.DIED if crash_at_exit(rank, notes) else RankStatus.FINISHED
    signals = {number: notes.signals.get(_process(attempt.ranks[number])) for number in silent}
    suspects = _suspects(silent, signals)
    first_death = min((when for n, when in silent.items() if n in suspects and when), default=float("inf"))
    for number, when in silent.items():
        if when is None:
            statuses[number] = _unseen(first_raise, notes, over)
            continue
        # Nobody saw it go: those that left before that was noticed, and did not say why, may well have lost it.
        unseen = signals[number] is None and _process(attempt.ranks[number]) in notes.found_gone
        blamed = first_reason if unseen else first_raise
        # Of several that nobody saw go, the order in which that was noticed tells nothing.
        since = when if unseen and not set(signals.values()) & set(_HARD) else first_death
        died = number in suspects and _died(when, signals[number], since, blamed, notes)
        statuses[number] = RankStatus.DIED if died else RankStatus.STOPPED
    return statuses


def _was_muted(number: int, rank: RankData, notes: NodeNotes) -> bool:
    """Whether it left in order but could not write so: a full disk, or a fault of our own at the exit."""
    left = _process(rank) in notes.exits and notes.signals.get(_process(rank), 0) == 0
    told = any(trouble.is_of(number, _process(rank)) for trouble in notes.troubles)
    return (told and left) or any(fault.probe == "exit" for fault in rank.faults)


def _process(rank: RankData) -> tuple[str, int]:
    return rank.header.host, rank.header.pid


def _suspects(silent: Mapping[int, float | None], signals: Mapping[int, int | None]) -> set[int]:
    """Ranks that vanished without having been asked to; where all were asked, all of them."""
    gone = {number: when for number, when in silent.items() if when is not None}
    killed = [when for number, when in gone.items() if signals[number] in _HARD]
    unasked = {
        number
        for number, when in gone.items()
        if signals[number] not in _POLITE
        # Of two that vanish together, the one known to have been killed is the likelier of the two.
        and not (signals[number] is None and any(abs(when - kill) <= TOGETHER_SECONDS for kill in killed))
    }
    return unasked or set(gone)


def _unseen(first_raise: float, notes: NodeNotes, over: bool) -> RankStatus:
    """A rank without last words whose end nobody saw."""
    if not over:
        return RankStatus.RUNNING
    excused = notes.stopped is not None or first_raise < float("inf")
    return RankStatus.STOPPED if excused else RankStatus.DIED


def _died(when: float, signal: int | None, first_death: float, first_raise: float, notes: NodeNotes) -> bool:
    """Whether nothing else brought this rank down: the first died, others were stopped because of it."""
    if notes.stopped is not None and notes.stopped <= when:
        return False
    # A killed process takes its time to vanish; others may complain of its closed connections before that.
    if first_raise <= when - (VANISH_SECONDS if signal in _HARD else 0.0):
        return False
    # Without its signal only the order tells; with it, a whole job that was killed at once is told as such.
    return when <= first_death + (TOGETHER_SECONDS if signal is not None else 0.0)


def _row(attempt: Attempt, number: int, rank: int, status: RankStatus, notes: NodeNotes) -> RankSummary:
    data = attempt.ranks[rank]
    detail = ""
    if data.end is not None and data.end.error:
        detail = data.end.error + (f" ({data.end.where})" if data.end.where else "")
    elif crash := crash_at_exit(data, notes):
        detail = f"{crash} after its work was done, while Python shut down"
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
