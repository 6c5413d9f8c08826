"""The exchange between ranks over a store: all receive the same report, and no rank waits forever."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest

from ddpcheck.analysis.finding import Severity
from ddpcheck.doctor import rendezvous
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.doctor.model import DoctorReport
from ddpcheck.doctor.rendezvous import (
    MAX_PEERS,
    Listener,
    RendezvousFailed,
    StoreClient,
    connect_to_others,
    exchange,
    measure_clock,
    open_store,
    peers_of,
)
from tests.helpers.doctor_contexts import job


class Store:
    """As c10d's, within one process."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()

    def set(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: self.check(keys), timeout.total_seconds()):
                raise RuntimeError("timed out")

    def add(self, key: str, more: int) -> int:
        with self._changed:
            self._values[key] = str(int(self._values.get(key, b"0")) + more).encode()
            return int(self._values[key])


def meeting_of(facts: list[Facts], seconds: float = 60.0) -> list[DoctorReport | None]:
    store = Store()
    with ThreadPoolExecutor(len(facts)) as ranks:
        return list(ranks.map(lambda each: exchange(StoreClient(store), each, seconds), facts))


def test_all_ranks_receive_the_same_report() -> None:
    listeners = [Listener(f"127.0.0.{number + 1}") for number in range(3)]
    context = job(3, 2)
    facts = [replace(each, listener=listeners[(each.rank or 0) // 2].described()) for each in context.facts]
    reports = meeting_of(facts)
    assert len({None if report is None else report.to_json() for report in reports}) == 1
    [first, *_] = reports
    assert first is not None
    assert {(call.caller, call.called) for call in first.context.calls} == {
        (f"node{a}", f"node{b}") for a in range(3) for b in range(3) if a != b
    }
    assert all(call.reason == "" for call in first.context.calls)
    # All of them read the same clock.
    assert {clock.host for clock in first.context.clocks} == {"node1", "node2"}
    assert all(abs(clock.offset) <= clock.uncertainty for clock in first.context.clocks)
    assert not first.has_problem
    for listener in listeners:
        listener.close()


def test_a_missing_rank_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_REPORT_SECONDS", 60.0)
    reports = meeting_of(list(job(1, 3).facts[:2]), seconds=0.3)
    for report in reports:
        assert report is not None
        [diagnosis] = [one for one in report.diagnoses if one.severity is Severity.ERROR]
        assert diagnosis.message == "Rank 2 of 3 did not report."


def test_no_rank_waits_forever_if_rank_0_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_REPORT_SECONDS", 0.2)
    assert meeting_of([job(1, 2).facts[1]], seconds=0.2) == [None]


def test_a_store_that_goes_away(monkeypatch: pytest.MonkeyPatch) -> None:
    class Gone(Store):
        def check(self, keys: list[str]) -> bool:
            raise RuntimeError("Connection reset by peer\nException raised from recvBytes")

    monkeypatch.setattr(rendezvous, "open_store", lambda *_: StoreClient(Gone()))
    with pytest.raises(RendezvousFailed, match=r"stopped answering: Connection reset by peer$"):
        rendezvous._report_of_job(job(1, 2).facts[1], 5.0)


def test_failed_connections() -> None:
    gone, here = Listener("127.0.0.1"), Listener("127.0.0.1")
    left = gone.described()
    gone.close()
    # Another process listens at the address and port of a host, as at 127.0.1.1 on every host.
    mistaken = {**here.described(), "token": "of another host"}
    calls = connect_to_others("node0", [("node1", left), ("node2", mistaken), ("node3", here.described())])
    assert [call.reason for call in calls] == [
        "connection refused",
        "another process answers at that address",
        "",
    ]
    here.close()


def test_peers_of() -> None:
    assert peers_of(1, 4) == [2, 3, 0]
    assert peers_of(0, 1) == []
    many = peers_of(90, 100)
    assert (len(many), many[:2], many[-1]) == (MAX_PEERS, [91, 92], 6)


class Elsewhere(StoreClient):
    """A host that answers with a clock of its own, slowly at first."""

    def __init__(self, ahead: float) -> None:
        super().__init__(Store())
        self._ahead, self._pause = ahead, 0.2

    def wait_for_bytes(self, key: str, seconds: float) -> bytes | None:
        time.sleep(self._pause)
        self._pause = 0.0
        return repr(time.time() + self._ahead).encode()


def test_a_clock_that_is_ahead() -> None:
    clock = measure_clock(Elsewhere(42.0), "node1", 1)
    assert clock is not None
    assert abs(clock.offset - 42.0) <= clock.uncertainty + 0.01
    assert clock.uncertainty < 0.1  # the slow answer does not count


@pytest.mark.parametrize(
    "environ", [{}, {"MASTER_ADDR": "node0"}, {"MASTER_ADDR": "node0", "MASTER_PORT": "x"}]
)
def test_without_a_store_address(environ: dict[str, str]) -> None:
    with pytest.raises(RendezvousFailed, match="not both set"):
        open_store(0, 1.0, environ)


def test_a_store_address_without_a_store() -> None:
    with pytest.raises(RendezvousFailed, match=r"127\.0\.0\.1:9:"):
        open_store(1, 1.0, {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"})
