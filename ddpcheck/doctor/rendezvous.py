"""The doctor in one rank: the ranks of a job exchange facts over its store, connect, and compare clocks."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from ddpcheck.doctor.facts.machine import collect
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.doctor.facts.torch_build import torch_facts
from ddpcheck.doctor.interface_selection import gloo_choice
from ddpcheck.doctor.model import ConnectionAttempt, DoctorContext, DoctorReport, HostClockOffset

_TIMEOUT_SECONDS = 3.0
_MAX_PARALLEL = 16
# Each host connects to at most this many others: with more hosts, not every pair is tried.
MAX_PEERS = 16


class Listener:
    """Accepts connections at one address and answers each with a random token."""

    def __init__(self, address: str) -> None:
        self._token = secrets.token_hex(8)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._server = socket.create_server((address, 0), family=family, backlog=64)
        self._address = address
        threading.Thread(target=self._accept, name="ddpcheck-doctor", daemon=True).start()

    def described(self) -> dict[str, Any]:
        return {"address": self._address, "port": self._server.getsockname()[1], "token": self._token}

    def close(self) -> None:
        # close() alone does not wake a thread that is blocked in accept().
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._server.accept()
            except OSError:
                return
            with caller, contextlib.suppress(OSError):
                caller.sendall(self._token.encode())


def connect_to_others(me: str, others: Sequence[tuple[str, dict[str, Any]]]) -> list[ConnectionAttempt]:
    """Connect to `others`: host names with the descriptions of their listeners."""
    if not others:
        return []
    with ThreadPoolExecutor(max_workers=_MAX_PARALLEL) as pool:
        return list(pool.map(lambda other: _try_connect(me, *other), others))


def peers_of(me: int, hosts: int) -> list[int]:
    """Numbers of the hosts that follow `me`, wrapping around."""
    return [(me + step) % hosts for step in range(1, min(hosts, MAX_PEERS + 1))]


def _try_connect(me: str, other: str, listener: dict[str, Any]) -> ConnectionAttempt:
    address = str(listener["address"])
    return ConnectionAttempt(
        me, other, address, _failure(address, int(listener["port"]), str(listener["token"]))
    )


def _failure(address: str, port: int, token: str) -> str:
    """Why the connection failed; empty if it succeeded."""
    try:
        with socket.create_connection((address, port), timeout=_TIMEOUT_SECONDS) as connection:
            answer = connection.recv(64).decode(errors="replace")
    except TimeoutError:
        return f"no answer within {_TIMEOUT_SECONDS:g} s"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    # The address may belong to another machine from here, such as 127.0.1.1.
    return "" if answer == token else "another process answers at that address"


_PREFIX = "ddpcheck/doctor"
# Exponential back-off: thousands of ranks may wait for the last one.
_FIRST_PAUSE, _MAX_PAUSE = 0.02, 0.5


class RendezvousFailed(Exception):
    """The store cannot be reached; the message says why."""


class StoreClient:
    """Key-value store shared by all ranks of a job."""

    def __init__(self, store: Any, attempt: str = "0") -> None:
        self._store = store
        # Keys of an earlier attempt may still be in the store.
        self._prefix = f"{_PREFIX}/{attempt}"

    def put(self, key: str, value: Any) -> None:
        self._store.set(f"{self._prefix}/{key}", zlib.compress(json.dumps(value).encode()))

    def wait_for(self, key: str, until: float) -> Any:
        """The value, or None if it is not set before `until`, a time of the monotonic clock."""
        name = f"{self._prefix}/{key}"
        pause = _FIRST_PAUSE
        # Poll: in older versions of torch a store is unusable after a wait that timed out.
        while not self._store.check([name]):
            if time.monotonic() >= until:
                return None
            time.sleep(pause)
            pause = min(_MAX_PAUSE, pause * 1.5)
        return json.loads(zlib.decompress(self._store.get(name)))

    def wait_for_bytes(self, key: str, seconds: float) -> bytes | None:
        """The raw value as soon as it is set, for clock measurements; None after `seconds`."""
        try:
            self._store.wait([f"{self._prefix}/{key}"], timedelta(seconds=max(0.001, seconds)))
        except RuntimeError:
            return None
        return bytes(self._store.get(f"{self._prefix}/{key}"))

    def put_bytes(self, key: str, value: bytes) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def add(self, key: str, amount: int = 1) -> int:
        return int(self._store.add(f"{self._prefix}/{key}", amount))


def open_store(rank: int, seconds: float, environ: Mapping[str, str] = os.environ) -> StoreClient:
    """Connect to the store at MASTER_ADDR and MASTER_PORT, served by the launcher or by rank 0."""
    import torch

    host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
    if not host or not port.isdecimal():
        raise RendezvousFailed("MASTER_ADDR and MASTER_PORT are not both set")
    served_by_launcher = environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    distributed: Any = torch.distributed
    try:
        store = distributed.TCPStore(
            host,
            int(port),
            is_master=rank == 0 and not served_by_launcher,
            timeout=timedelta(seconds=seconds),
            # Missing ranks are reported, not waited for.
            wait_for_workers=False,
        )
    except (RuntimeError, ValueError) as error:
        raise RendezvousFailed(f"{host}:{port}: {_first_line(error)}") from error
    return StoreClient(store, environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")


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


def report_as_rank(folder: Path, injection: dict[str, Any], seconds: float) -> tuple[DoctorReport, bool]:
    """The report, and whether this rank is the first of its machine."""
    facts = collect(folder, torch_facts, lambda: injection)
    if facts.rank is None or facts.world_size is None:
        return DoctorReport.of(DoctorContext((facts,))), True
    listener = _open_listener(facts)
    if listener is not None:
        facts = replace(facts, listener=listener.described())
    try:
        return _report_of_job(facts, seconds)
    except RendezvousFailed as error:
        return _report_of_this_rank(facts, str(error))
    finally:
        if listener is not None:
            listener.close()


def _report_of_job(facts: Facts, seconds: float) -> tuple[DoctorReport, bool]:
    if facts.torch.get("error"):
        raise RendezvousFailed("torch cannot be imported")
    client = open_store(facts.rank or 0, seconds)
    try:
        report = exchange(client, facts, seconds)
    except RuntimeError as error:  # the store is gone, usually because rank 0 ended
        raise RendezvousFailed(f"the store stopped answering: {str(error).partition(chr(10))[0]}") from error
    if report is None:
        raise RendezvousFailed("rank 0 created no report")
    first = {host.first.rank for host in report.context.hosts}
    return report, facts.rank in first


def _report_of_this_rank(facts: Facts, reason: str) -> tuple[DoctorReport, bool]:
    context = DoctorContext((facts,), facts.world_size, rendezvous_error=reason)
    return DoctorReport.of(context), not facts.local_rank


def _open_listener(facts: Facts) -> Listener | None:
    chosen = gloo_choice(facts)
    try:
        return None if chosen is None else Listener(chosen.address)
    except OSError:
        return None
