"""Determines how each rank ended, from its last record and from what its launcher observed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from signal import SIGABRT, SIGBUS, SIGFPE, SIGHUP, SIGILL, SIGINT, SIGKILL, SIGSEGV, SIGTERM

from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.rank_data import RankData
from ddpcheck.analysis.node_notes import NodeNotes
from ddpcheck.analysis.report import RankStatus, RankSummary

# Processes that exit within this time of each other may have received the same signal.
TOGETHER_SECONDS = 0.05
# Time that a killed process may take to exit.
VANISH_SECONDS = 2.0
# Signals by which launchers stop the other ranks after one has died.
_STOP_SIGNALS = (SIGTERM, SIGINT, SIGHUP)
# Signals that are never a consequence of the death of another rank; SIGABRT may be.
_KILL_SIGNALS = (SIGKILL, SIGSEGV, SIGBUS, SIGILL, SIGFPE)
# Signals of crashes: after the last record, the process crashed while Python shut down.
_CRASH_SIGNALS: dict[int, str] = {
    SIGABRT: "SIGABRT",
    SIGSEGV: "SIGSEGV",
    SIGBUS: "SIGBUS",
    SIGILL: "SIGILL",
    SIGFPE: "SIGFPE",
}
# Messages of gloo, NCCL, MPI and the stores after the peer of a connection has exited. A rank with such an error is not
# the first that failed.
_LOST_PEER = re.compile(
    r"connection (?:was )?(?:closed|reset|aborted)|broken pipe|failed to recv, got 0 bytes|socket closed"
    r"|ncclRemoteError|remote process exited|peer (?:has )?(?:closed|exited|is dead)",
    re.IGNORECASE,
)
# The error of a rank whose exception the launcher caught.
_NO_REASON = re.compile(r"exit status \d+")


def summaries(attempt: Attempt, number: int, notes: NodeNotes, over: bool) -> tuple[RankSummary, ...]:
    """One row per rank, including missing ranks. `over`: the command has ended."""
    statuses = _statuses(attempt, notes, over)
    rows = [_row(attempt, number, rank, statuses[rank], notes) for rank in sorted(attempt.ranks)]
    rows += [
        RankSummary(rank, RankStatus.MISSING, attempt=number, detail="never reported")
        for rank in sorted(expected_ranks(attempt) - attempt.ranks.keys())
    ]
    return tuple(sorted(rows, key=lambda row: row.rank))


def expected_ranks(attempt: Attempt) -> set[int]:
    """The ranks whose records should be in this folder: all, unless some nodes write to another folder."""
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


def lost_peer(error: str) -> bool:
    """Whether an error is the consequence of the exit of another rank."""
    return bool(_LOST_PEER.search(error))


def crash_at_exit(rank: RankData, notes: NodeNotes) -> str:
    """The signal that ended the process after its last record; empty for none."""
    if rank.end is None or rank.end.error:
        return ""
    return _CRASH_SIGNALS.get(notes.signals.get(_process(rank), 0), "")


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
        if rank.end is None and not _could_not_write(number, rank, notes):
            silent[number] = notes.exits.get(_process(rank))
        elif rank.end is not None and rank.end.error:
            # Errors after a request to stop the job are consequences of it.
            after_stop = notes.stopped is not None and notes.stopped <= rank.end.time
            by_user = after_stop or rank.end.error.startswith("KeyboardInterrupt")
            statuses[number] = RankStatus.STOPPED if by_user else RankStatus.RAISED
            # The exit of a rank may be noticed only after the errors of its peers, and without its signal: then only
            # these error messages show the order.
            if not lost_peer(rank.end.error):
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
        # The time of its exit is not known: ranks that exited earlier without a reason may be consequences of it.
        unseen = signals[number] is None and _process(attempt.ranks[number]) in notes.found_gone
        first_error = first_reason if unseen else first_raise
        # The order in which such exits were noticed is not the order of the exits.
        since = when if unseen and not set(signals.values()) & set(_KILL_SIGNALS) else first_death
        died = number in suspects and _died(when, signals[number], since, first_error, notes)
        statuses[number] = RankStatus.DIED if died else RankStatus.STOPPED
    return statuses


def _could_not_write(number: int, rank: RankData, notes: NodeNotes) -> bool:
    """Whether the rank exited normally but could not record it: a full disk, or an internal error at exit."""
    exited = _process(rank) in notes.exits and notes.signals.get(_process(rank), 0) == 0
    failed = any(error.is_of(number, _process(rank)) for error in notes.write_errors)
    return (failed and exited) or any(fault.probe == "exit" for fault in rank.faults)


def _process(rank: RankData) -> tuple[str, int]:
    return rank.header.host, rank.header.pid


def _suspects(silent: Mapping[int, float | None], signals: Mapping[int, int | None]) -> set[int]:
    """Ranks that exited without a stop signal; all ranks if all received one."""
    exited = {number: when for number, when in silent.items() if when is not None}
    killed = [when for number, when in exited.items() if signals[number] in _KILL_SIGNALS]
    unasked = {
        number
        for number, when in exited.items()
        if signals[number] not in _STOP_SIGNALS
        # Of two ranks that exit together, the one that is known to be killed is the more likely cause.
        and not (signals[number] is None and any(abs(when - kill) <= TOGETHER_SECONDS for kill in killed))
    }
    return unasked or set(exited)


def _unseen(first_raise: float, notes: NodeNotes, over: bool) -> RankStatus:
    """The status of a rank without a last record whose exit was not observed."""
    if not over:
        return RankStatus.RUNNING
    explained = notes.stopped is not None or first_raise < float("inf")
    return RankStatus.STOPPED if explained else RankStatus.DIED


def _died(when: float, signal: int | None, first_death: float, first_raise: float, notes: NodeNotes) -> bool:
    """Whether this rank died by itself. Ranks that exit after the first death or error were stopped because of it."""
    if notes.stopped is not None and notes.stopped <= when:
        return False
    # A killed process takes some time to exit; its peers may raise errors about closed connections before that.
    if first_raise <= when - (VANISH_SECONDS if signal in _KILL_SIGNALS else 0.0):
        return False
    # If its signal is known, ranks that were killed at the same time all died. Otherwise only the first did.
    return when <= first_death + (TOGETHER_SECONDS if signal is not None else 0.0)


def _row(attempt: Attempt, number: int, rank: int, status: RankStatus, notes: NodeNotes) -> RankSummary:
    data = attempt.ranks[rank]
    detail = ""
    if data.end is not None and data.end.error:
        detail = data.end.error + (f" ({data.end.where})" if data.end.where else "")
    elif crash := crash_at_exit(data, notes):
        detail = f"{crash} after the end of training, while Python shut down"
    elif data.end is not None and data.end.dropped:
        detail = f"{data.end.dropped} records lost: the disk was too slow"
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
