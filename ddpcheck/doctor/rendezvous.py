"""The exchange between ranks over the job's store: facts to rank 0, connection tests, clocks, report to all."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from ddpcheck.doctor.connectivity import connect_to_others, peers_of
from ddpcheck.doctor.context import ConnectionAttempt, DoctorContext, HostClockOffset
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.doctor.model import DoctorReport
from ddpcheck.doctor.store_client import StoreClient

_CLOCK_ROUNDS = 5
_CLOCK_TIMEOUT_SECONDS = 5.0
# Time limit for connection tests, clocks and the report, after all ranks have reported.
_REPORT_SECONDS = 60.0


def measure_clock(client: StoreClient, host: str, number: int) -> HostClockOffset | None:
    """Run by rank 0: the clock offset of host `number`, from the fastest of several requests."""
    best: HostClockOffset | None = None
    for turn in range(_CLOCK_ROUNDS):
        sent = time.time()
        client.put_bytes(f"clock/{number}/{turn}/request", b"?")
        answer = client.wait_for_bytes(f"clock/{number}/{turn}/answer", _CLOCK_TIMEOUT_SECONDS)
        if answer is None:
            return best
        received = time.time()
        # The other clock was read between these two times.
        clock = HostClockOffset(host, float(answer) - (sent + received) / 2, (received - sent) / 2)
        if best is None or clock.uncertainty < best.uncertainty:
            best = clock
    return best


def answer_clock_requests(client: StoreClient, number: int, until: float) -> None:
    """Run by the first rank of each host."""
    for turn in range(_CLOCK_ROUNDS):
        if client.wait_for_bytes(f"clock/{number}/{turn}/request", until - time.monotonic()) is None:
            return
        client.put_bytes(f"clock/{number}/{turn}/answer", repr(time.time()).encode())


def exchange(client: StoreClient, facts: Facts, seconds: float) -> DoctorReport | None:
    """The report on all ranks, equal on each of them; None if rank 0 created none."""
    until = time.monotonic() + seconds
    rank, world_size = facts.rank or 0, facts.world_size or 1
    client.put(f"facts/{rank}", facts.as_json())
    if rank == 0:
        report = _coordinate(client, world_size, until)
        client.put("report", report.to_json())
    plan = client.wait_for("plan", until + _REPORT_SECONDS)
    if rank != 0:
        if plan is not None:
            _participate(client, plan, rank, time.monotonic() + _REPORT_SECONDS)
        text = client.wait_for("report", time.monotonic() + _REPORT_SECONDS)
        if text is None:
            return None
        report = DoctorReport.from_json(text)
    _wait_for_all_to_finish(client, rank, len(report.context.facts))
    return report


def _coordinate(client: StoreClient, world_size: int, until: float) -> DoctorReport:
    """Run by rank 0: collect facts, start the connection tests, measure clocks, build the report."""
    collected = [client.wait_for(f"facts/{rank}", until) for rank in range(world_size)]
    facts = tuple(Facts.from_json(each) for each in collected if each is not None)
    missing = tuple(rank for rank, each in enumerate(collected) if each is None)
    hosts = DoctorContext(facts, world_size).hosts
    plan = [
        {"host": host.name, "rank": host.facts[0].rank, "listener": dict(host.first.listener)}
        for host in hosts
    ]
    client.put("plan", plan)
    attempts = _connect(plan, 0)
    clocks = [measure_clock(client, host.name, number) for number, host in enumerate(hosts) if number]
    until = time.monotonic() + _REPORT_SECONDS
    for number in range(1, len(hosts)):
        attempts += [ConnectionAttempt(**each) for each in client.wait_for(f"calls/{number}", until) or ()]
    offsets = tuple(clock for clock in clocks if clock is not None)
    return DoctorReport.of(DoctorContext(facts, world_size, missing, offsets, tuple(attempts)))


def _participate(client: StoreClient, plan: list[dict[str, Any]], rank: int, until: float) -> None:
    """Run by all others; only the first rank of each host has anything to do."""
    number = next((index for index, host in enumerate(plan) if host["rank"] == rank), None)
    if number is None:
        return
    answer_clock_requests(client, number, until)
    client.put(f"calls/{number}", [asdict(attempt) for attempt in _connect(plan, number)])


def _connect(plan: list[dict[str, Any]], me: int) -> list[ConnectionAttempt]:
    others = [(plan[index]["host"], plan[index]["listener"]) for index in peers_of(me, len(plan))]
    return connect_to_others(plan[me]["host"], [(host, listener) for host, listener in others if listener])


def _wait_for_all_to_finish(client: StoreClient, rank: int, expected: int) -> None:
    """Rank 0 may serve the store and must exit last."""
    finished = client.add("finished")
    until = time.monotonic() + _REPORT_SECONDS
    while rank == 0 and finished < expected and time.monotonic() < until:
        time.sleep(0.05)
        finished = client.add("finished", 0)
