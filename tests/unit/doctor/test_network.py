"""Checks of host names, interfaces and networks, healthy and with problems."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddpcheck.analysis.finding import Severity
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.doctor.model import DoctorContext
from tests.helpers.doctor_contexts import (
    card,
    job,
    loopback,
    machine,
    problems,
    single,
    the_problem,
)

ERROR, WARNING, NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


def named(facts: Facts, *addresses: str, own: bool = True, takes: str = "") -> Facts:
    names = {"host": facts.host, "addresses": list(addresses), "own": list(addresses) if own else []}
    torch = {**facts.torch, "gloo_takes": {"addresses": [takes or "127.0.0.1"]}}
    return replace(facts, names=names, torch=torch)


def test_a_name_that_is_the_loopback_is_harmless_on_one_host_only() -> None:
    here = the_problem(DoctorContext((named(machine(), "127.0.1.1"),)), "host name")
    assert (here.severity, "127.0.1.1" in here.message) == (NOTE, True)
    context = job(2, 2, lambda facts: named(facts, "127.0.1.1") if facts.host == "node1" else facts)
    diagnosis = the_problem(context, "host name")
    assert (diagnosis.severity, diagnosis.hosts, diagnosis.ranks) == (ERROR, ("node1",), (2, 3))
    assert "GLOO_SOCKET_IFNAME" in diagnosis.fix


def test_the_same_where_a_scheduler_says_that_there_are_more_hosts() -> None:
    here = replace(named(machine(), "127.0.1.1"), environment={"SLURM_JOB_NUM_NODES": "2"})
    assert the_problem(DoctorContext((here,)), "host name").severity is ERROR


def test_names_that_do_not_resolve_or_resolve_elsewhere() -> None:
    def unresolved(facts: Facts) -> Facts:
        return named(facts)

    def elsewhere(facts: Facts) -> Facts:
        return named(facts, "192.0.2.9", own=False)

    assert (
        "does not resolve"
        in the_problem(
            job(2, 1, lambda facts: unresolved(facts) if facts.rank else facts), "host name"
        ).message
    )
    diagnosis = the_problem(job(2, 1, lambda facts: elsewhere(facts) if facts.rank else facts), "host name")
    assert (diagnosis.severity, "not an address of this machine" in diagnosis.message) == (ERROR, True)


def test_a_loopback_name_is_harmless_if_a_variable_selects_the_interface() -> None:
    def with_variable(facts: Facts) -> Facts:
        address = str(facts.torch["gloo_takes"]["addresses"][0])
        return replace(named(facts, "127.0.1.1", takes=address), environment={"GLOO_SOCKET_IFNAME": "eth0"})

    assert problems(job(2, 1, with_variable), "host name") == []


def test_the_store_address() -> None:
    def meets_at(name: str, *addresses: str) -> Any:
        master = {"name": name, "addresses": list(addresses), "reason": "Name or service not known"}
        return lambda facts: replace(facts, names={**facts.names, "master": master})

    lost = the_problem(DoctorContext((meets_at("head")(machine()),)), "host name")
    assert (lost.severity, "Name or service not known" in lost.message) == (ERROR, True)
    itself = the_problem(job(2, 1, meets_at("localhost", "127.0.0.1")), "host name")
    assert (itself.severity, itself.ranks) == (ERROR, (1,))
    assert problems(job(1, 2, meets_at("localhost", "127.0.0.1")), "host name") == []
    assert problems(job(2, 1, meets_at("node0", "10.0.0.1")), "host name") == []


@pytest.mark.parametrize(
    ("name", "because"),
    [
        ("eth7", "not an interface of this"),
        ("eth1", "is down"),
        ("eth2", "has no address"),
        ("eth0,eth7", "eth7 is not"),
    ],
)
def test_interfaces_that_gloo_cannot_use(name: str, because: str) -> None:
    rows = [loopback(), card("eth0", "10.0.0.1/24"), card("eth1", "10.1.0.1/24", up=False), card("eth2", "")]
    torch = {**machine().torch, "gloo_takes": {"error": "Unable to find address for: " + name}}
    diagnosis = the_problem(
        single(interfaces=rows, torch=torch, environment={"GLOO_SOCKET_IFNAME": name}), "interfaces"
    )
    assert diagnosis.severity is ERROR
    assert because in diagnosis.message
    assert "Available: eth0." in diagnosis.fix


def test_the_loopback_as_gloos_interface() -> None:
    def change(facts: Facts) -> Facts:
        torch = {**facts.torch, "gloo_takes": {"addresses": ["127.0.0.1"]}}
        return replace(facts, torch=torch, environment={"GLOO_SOCKET_IFNAME": "lo"})

    assert the_problem(job(2, 1, change), "interfaces").severity is ERROR
    assert problems(job(1, 2, change), "interfaces") == []


def test_an_interface_for_nccl_that_is_not_there() -> None:
    diagnosis = the_problem(single(environment={"NCCL_SOCKET_IFNAME": "ib"}), "interfaces")
    assert (diagnosis.severity, "matches no interface" in diagnosis.message) == (ERROR, True)
    assert problems(single(environment={"NCCL_SOCKET_IFNAME": "eth"}), "interfaces") == []


def test_a_faster_interface_beside_the_one_taken() -> None:
    rows = [loopback(), card("eth0", "10.0.0.1/24", speed=1000), card("eth1", "10.1.0.1/24", speed=100_000)]
    diagnosis = the_problem(single(interfaces=rows), "interfaces")
    assert (diagnosis.severity, "eth1 has 100 Gbit/s" in diagnosis.message) == (NOTE, True)


def carded(
    number: int, *, mtu: int = 1500, speed: int | None = 10_000, fast: bool = False
) -> list[dict[str, Any]]:
    rows = [loopback(), card("eth0", f"10.0.0.{number + 1}/24", mtu=mtu, speed=speed)]
    return [*rows, card("eth1", f"10.1.0.{number + 1}/24", speed=100_000)] if fast else rows


def place_of(facts: Facts) -> int:
    return int(facts.host[4:])


def test_hosts_that_differ_in_mtu() -> None:
    def change(facts: Facts) -> Facts:
        number = place_of(facts)
        return replace(facts, interfaces=carded(number, mtu=9000 if number == 1 else 1500))

    diagnosis = the_problem(job(3, 2, change), "networks")
    assert (diagnosis.severity, diagnosis.hosts) == (WARNING, ("node1",))
    assert "1500 on node0 (eth0), node2 (eth0); 9000 on node1 (eth0)" in diagnosis.message


def test_hosts_that_differ_in_speed() -> None:
    def change(facts: Facts) -> Facts:
        number = place_of(facts)
        return replace(facts, interfaces=carded(number, speed=1000 if number == 2 else 10_000))

    diagnosis = the_problem(job(3, 1, change), "networks")
    assert (diagnosis.severity, diagnosis.hosts, "1 Gbit/s on node2" in diagnosis.message) == (
        WARNING,
        ("node2",),
        True,
    )


def test_an_unknown_speed_is_not_a_difference() -> None:
    def change(facts: Facts) -> Facts:
        return replace(facts, interfaces=carded(place_of(facts), speed=None if facts.rank else 10_000))

    assert problems(job(2, 1, change), "networks") == []


def test_a_faster_network_that_all_hosts_share() -> None:
    diagnosis = the_problem(
        job(2, 1, lambda facts: replace(facts, interfaces=carded(place_of(facts), fast=True))), "networks"
    )
    assert (diagnosis.severity, "GLOO_SOCKET_IFNAME=eth1" in diagnosis.fix) == (WARNING, True)

    def on_one_host_only(facts: Facts) -> Facts:
        return replace(facts, interfaces=carded(place_of(facts), fast=facts.rank == 0))

    assert problems(job(2, 1, on_one_host_only), "networks") == []


def test_hosts_that_cannot_be_reached() -> None:
    context = job(3, 1)
    calls = tuple(
        replace(call, reason="connection refused", address="127.0.1.1") if call.called == "node1" else call
        for call in context.calls
    )
    diagnosis = the_problem(replace(context, calls=calls), "connections")
    assert diagnosis.message == "No other host can reach node1 at 127.0.1.1 (connection refused)."
    one_way = tuple(
        replace(call, reason="no answer within 3 s")
        if (call.caller, call.called) == ("node2", "node1")
        else call
        for call in context.calls
    )
    diagnosis = the_problem(replace(context, calls=one_way), "connections")
    assert diagnosis.message == "node2 cannot reach node1 at 10.0.0.2 (no answer within 3 s)."
