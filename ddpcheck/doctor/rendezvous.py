"""How the ranks of a job come together over its store: facts to rank 0, calls and clocks, and the report back."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from ddpcheck.doctor.connectivity import call_others, whom_to_call
from ddpcheck.doctor.context import ConnectionAttempt, DoctorContext, HostClockOffset
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.doctor.model import DoctorReport
from ddpcheck.doctor.store_client import StoreClient

_TIMES = 5
_SECONDS = 5.0


def ask_time(board: StoreClient, host: str, number: int) -> HostClockOffset | None:
    """By rank 0, of the host of that number; the quickest answer counts."""
    best: HostClockOffset | None = None
    for turn in range(_TIMES):
        asked = time.time()
        board.say(f"clock/{number}/{turn}/ask", b"?")
        told = board.answer(f"clock/{number}/{turn}/told", _SECONDS)
        if told is None:
            return best
        heard = time.time()
        # The other clock was read somewhere between the two.
        seen = HostClockOffset(host, float(told) - (asked + heard) / 2, (heard - asked) / 2)
        if best is None or seen.uncertainty < best.uncertainty:
            best = seen
    return best


def tell_time(board: StoreClient, number: int, until: float) -> None:
    """By the first rank of a host."""
    for turn in range(_TIMES):
        if board.answer(f"clock/{number}/{turn}/ask", until - time.monotonic()) is None:
            return
        board.say(f"clock/{number}/{turn}/told", repr(time.time()).encode())


# For what follows once everybody has reported: calls, clocks and the report.
_AFTERWARDS = 60.0


def meet(board: StoreClient, facts: Facts, seconds: float) -> DoctorReport | None:
    """The report on all ranks, the same on each; None where rank 0 did not make one."""
    until = time.monotonic() + seconds
    rank, world_size = facts.rank or 0, facts.world_size or 1
    board.put(f"facts/{rank}", facts.as_json())
    if rank == 0:
        report = _chair(board, world_size, until)
        board.put("report", report.to_json())
    plan = board.take("plan", until + _AFTERWARDS)
    if rank != 0:
        if plan is not None:
            _take_part(board, plan, rank, time.monotonic() + _AFTERWARDS)
        text = board.take("report", time.monotonic() + _AFTERWARDS)
        if text is None:
            return None
        report = DoctorReport.from_json(text)
    _leave(board, rank, len(report.scene.facts))
    return report


def _chair(board: StoreClient, world_size: int, until: float) -> DoctorReport:
    """Rank 0: wait for all, see that hosts call each other, ask for the time."""
    told = [board.take(f"facts/{rank}", until) for rank in range(world_size)]
    here = tuple(Facts.from_json(each) for each in told if each is not None)
    missing = tuple(rank for rank, each in enumerate(told) if each is None)
    hosts = DoctorContext(here, world_size).hosts
    plan = [
        {"host": host.name, "rank": host.facts[0].rank, "listener": dict(host.first.listener)}
        for host in hosts
    ]
    board.put("plan", plan)
    calls = _call(plan, 0)
    clocks = [ask_time(board, host.name, number) for number, host in enumerate(hosts) if number]
    until = time.monotonic() + _AFTERWARDS
    for number in range(1, len(hosts)):
        calls += [ConnectionAttempt(**each) for each in board.take(f"calls/{number}", until) or ()]
    found = tuple(clock for clock in clocks if clock is not None)
    return DoctorReport.of(DoctorContext(here, world_size, missing, found, tuple(calls)))


def _take_part(board: StoreClient, plan: list[dict[str, Any]], rank: int, until: float) -> None:
    """The first rank of each host speaks for it."""
    number = next((place for place, host in enumerate(plan) if host["rank"] == rank), None)
    if number is None:
        return
    tell_time(board, number, until)
    board.put(f"calls/{number}", [asdict(call) for call in _call(plan, number)])


def _call(plan: list[dict[str, Any]], me: int) -> list[ConnectionAttempt]:
    others = [(plan[place]["host"], plan[place]["listener"]) for place in whom_to_call(me, len(plan))]
    return call_others(plan[me]["host"], [(host, listener) for host, listener in others if listener])


def _leave(board: StoreClient, rank: int, everybody: int) -> None:
    """Rank 0 may hold the store, and goes last."""
    gone = board.count("gone")
    until = time.monotonic() + _AFTERWARDS
    while rank == 0 and gone < everybody and time.monotonic() < until:
        time.sleep(0.05)
        gone = board.count("gone", 0)
