"""What a host's own name resolves to: gloo binds to it, and other hosts must be able to connect there."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from ddpcheck.doctor.context import DoctorContext
from ddpcheck.doctor.diagnosis import Diagnosis, Level
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.doctor.interface_selection import GLOO_VARIABLE, gloo_choice

NAME = "host name"


def find(scene: DoctorContext) -> list[Diagnosis]:
    first = next((each.place for each in scene.facts if each.rank == 0), None)
    return [
        *scene.by_host(lambda facts: _own_name(facts, scene.spans_hosts)),
        # On the host of rank 0 its own name may well be the loopback: the store listens on all addresses.
        *scene.by_rank(lambda facts: _master(facts, scene.spans_hosts and facts.place != first)),
    ]


def _own_name(facts: Facts, across: bool) -> list[Diagnosis]:
    names = facts.names
    name, addresses = names.get("host", facts.host), [str(one) for one in names.get("addresses", ())]
    own = [str(one) for one in names.get("own", ())]
    if own and not _is_loopback(own[0]):
        return [Diagnosis(NAME, Level.OK, f"{name} is {own[0]}")]
    if not addresses:
        what = f"{name} does not resolve, and gloo would bind to 127.0.0.1 instead"
    elif not own:
        what = f"{name} resolves to {_listed(addresses)}, which is no address of this machine"
    else:
        what = f"{name} resolves to {own[0]}"
    chosen = gloo_choice(facts)
    if chosen is not None and not chosen.is_loopback:
        # Somebody has told gloo better.
        return [Diagnosis(NAME, Level.OK, f"{what}; gloo was told to take {chosen.name}")]
    return [
        Diagnosis(
            NAME,
            Level.PROBLEM if across else Level.NOTE,
            f"{what}.",
            "gloo binds to what the host's own name resolves to; at a loopback address no other host can connect."
            + ("" if across else " On one machine alone that does no harm."),
            f"Set {GLOO_VARIABLE} to the interface between the hosts, or let the name resolve to its address "
            "(see /etc/hosts).",
            evidence={"name": name, "addresses": addresses},
        )
    ]


def _master(facts: Facts, across: bool) -> list[Diagnosis]:
    master = facts.names.get("master") or {}
    if not master:
        return []
    name, addresses = master.get("name"), [str(one) for one in master.get("addresses", ())]
    why = "Ranks meet there before anything else."
    if not addresses:
        return [
            Diagnosis(
                NAME,
                Level.PROBLEM,
                f"MASTER_ADDR is {name}, which does not resolve: {master.get('reason', 'unknown')}.",
                why,
                "Set MASTER_ADDR to the address of rank 0's host.",
            )
        ]
    if not across or name == facts.names.get("host") or not _is_loopback(addresses[0]):
        return []
    told = name if name == addresses[0] else f"{name}, which is {addresses[0]}"
    return [
        Diagnosis(
            NAME,
            Level.PROBLEM,
            f"MASTER_ADDR is {told}: this host would look for rank 0 on itself.",
            why,
            "Set MASTER_ADDR to an address of rank 0's host that the others reach.",
        )
    ]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _listed(addresses: Sequence[str]) -> str:
    return ", ".join(addresses[:3])
