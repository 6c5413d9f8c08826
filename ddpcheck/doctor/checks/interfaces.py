"""Host names and interfaces: the addresses that gloo and NCCL bind to."""

from __future__ import annotations

import ipaddress

from ddpcheck.analysis.finding import Severity
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.doctor.interface_selection import (
    GLOO_VARIABLE,
    NCCL_VARIABLE,
    InterfaceChoice,
    gloo_choice,
    gloo_names,
    interface_named,
    nccl_choice,
    speed_text,
)
from ddpcheck.doctor.model import Diagnosis, DoctorContext, check, diagnosis, note, ok, problem

# Report an interface that is at least this much faster.
_FASTER_RATIO = 2.0
_DOWN = "is down"
_LOOPBACK_CAUSE = "No other host can connect to a loopback address."


@check("host name", order=60)
def host_name(context: DoctorContext) -> list[Diagnosis]:
    first = next((each.place for each in context.facts if each.rank == 0), None)
    return [
        *context.by_host(lambda facts: _own_host_name(facts, context.spans_hosts)),
        # On the host of rank 0 the name may resolve to the loopback: the store listens on all addresses.
        *context.by_rank(lambda facts: _master_address(facts, context.spans_hosts and facts.place != first)),
    ]


def _own_host_name(facts: Facts, multi_host: bool) -> list[Diagnosis]:
    names = facts.names
    name, addresses = names.get("host", facts.host), [str(one) for one in names.get("addresses", ())]
    own = [str(one) for one in names.get("own", ())]
    if own and not _is_loopback(own[0]):
        return [ok(f"{name} is {own[0]}")]
    if not addresses:
        what = f"{name} does not resolve, so gloo binds to 127.0.0.1"
    elif not own:
        what = f"{name} resolves to {', '.join(addresses[:3])}, which is not an address of this machine"
    else:
        what = f"{name} resolves to {own[0]}"
    chosen = gloo_choice(facts)
    if chosen is not None and not chosen.is_loopback:
        return [ok(f"{what}; GLOO_SOCKET_IFNAME selects {chosen.name}")]
    return [
        diagnosis(
            Severity.ERROR if multi_host else Severity.NOTE,
            f"{what}.",
            "gloo binds to the address that the host name resolves to. No other host can connect to a loopback address."
            + ("" if multi_host else " On a single machine this is harmless."),
            f"Set {GLOO_VARIABLE} to the interface between the hosts, or make the name resolve to its address "
            "(see /etc/hosts).",
            evidence={"name": name, "addresses": addresses},
        )
    ]


def _master_address(facts: Facts, multi_host: bool) -> list[Diagnosis]:
    master = facts.names.get("master") or {}
    if not master:
        return []
    name, addresses = master.get("name"), [str(one) for one in master.get("addresses", ())]
    cause = "Ranks connect to this address first."
    if not addresses:
        return [
            problem(
                f"MASTER_ADDR is {name}, which does not resolve: {master.get('reason', 'unknown')}.",
                cause,
                "Set MASTER_ADDR to the address of rank 0's host.",
            )
        ]
    if not multi_host or name == facts.names.get("host") or not _is_loopback(addresses[0]):
        return []
    resolved = name if name == addresses[0] else f"{name}, which resolves to {addresses[0]}"
    return [
        problem(
            f"MASTER_ADDR is {resolved}: ranks on this host would look for rank 0 on this host.",
            cause,
            "Set MASTER_ADDR to an address of rank 0's host that the other hosts can reach.",
        )
    ]


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


@check("interfaces", order=70)
def interfaces(context: DoctorContext) -> list[Diagnosis]:
    return context.by_rank(lambda facts: _interfaces(facts, context.spans_hosts))


def _interfaces(facts: Facts, multi_host: bool) -> list[Diagnosis]:
    diagnoses = [*_gloo_interface(facts, multi_host), *_nccl_interface(facts, multi_host)]
    if not multi_host:  # with several hosts, the check of networks compares those that connect them
        diagnoses += _faster_interface(facts)
    return diagnoses or [ok(_interface_line(facts))]


def _gloo_interface(facts: Facts, multi_host: bool) -> list[Diagnosis]:
    error = (facts.torch.get("gloo_takes") or {}).get("error")
    for name in gloo_names(facts):
        reason = _unusable(facts, name)
        # On one machine, packets stay local and an interface that is down is harmless.
        if reason and (multi_host or error or reason != _DOWN):
            cause = "gloo fails to create the process group, or ranks cannot connect."
            return [_bad_variable(facts, GLOO_VARIABLE, f"{name} {reason}", cause)]
    if error:
        return [
            problem(
                f"gloo finds no interface: {error}.",
                "gloo cannot create a process group on this host.",
                f"Set {GLOO_VARIABLE} to an interface that is up and has an address.",
            )
        ]
    chosen = gloo_choice(facts)
    if multi_host and chosen is not None and chosen.is_loopback and gloo_names(facts):
        return [_bad_variable(facts, GLOO_VARIABLE, f"{chosen.name} is the loopback", _LOOPBACK_CAUSE)]
    return []


def _nccl_interface(facts: Facts, multi_host: bool) -> list[Diagnosis]:
    if not facts.environment.get(NCCL_VARIABLE):
        return []
    chosen = nccl_choice(facts)
    if chosen is None:
        what, cause = "matches no interface that is up and has an address", "NCCL cannot reach other ranks."
    elif multi_host and chosen.is_loopback:
        what, cause = f"selects {chosen.name}, the loopback", _LOOPBACK_CAUSE
    else:
        return []
    return [_bad_variable(facts, NCCL_VARIABLE, what, cause)]


def _bad_variable(facts: Facts, variable: str, what: str, cause: str) -> Diagnosis:
    usable = [
        str(one["name"])
        for one in facts.interfaces
        if one.get("class") != "loopback" and one.get("running") and one.get("addresses")
    ]
    available = f"Available: {', '.join(usable[:6])}." if usable else "Only the loopback is available."
    return problem(
        f"{variable} is {facts.environment.get(variable)}: {what}.",
        cause,
        f"Set it to an interface that reaches the other hosts, or unset it. {available}",
    )


def _unusable(facts: Facts, name: str) -> str:
    if not facts.interfaces:
        return ""  # unknown on this host
    known = interface_named(facts, name)
    if known is None:
        return "is not an interface of this host"
    if not known.get("running", True):
        return _DOWN
    return "" if known.get("addresses") else "has no address"


def _faster_interface(facts: Facts) -> list[Diagnosis]:
    chosen = gloo_choice(facts)
    if chosen is None or chosen.is_loopback or not chosen.speed:
        return []
    better = [
        one
        for one in facts.interfaces
        if one.get("running")
        and one.get("addresses")
        and (one.get("speed") or 0) >= _FASTER_RATIO * chosen.speed
    ]
    if not better:
        return []
    best = max(better, key=lambda one: int(one["speed"]))
    return [
        note(
            f"gloo uses {chosen}, but {best['name']} has {speed_text(best['speed'])}.",
            "If both reach the other hosts, gradients use the slower network.",
            f"Set {GLOO_VARIABLE} and {NCCL_VARIABLE} to {best['name']} if it reaches the other hosts.",
        )
    ]


def _interface_line(facts: Facts) -> str:
    selected = [f"gloo uses {_choice_text(gloo_choice(facts))}"]
    if facts.gpus.get("gpus") or facts.environment.get(NCCL_VARIABLE):
        selected.append(f"NCCL {_choice_text(nccl_choice(facts))} (by its documented rule)")
    return "; ".join(selected)


def _choice_text(choice: InterfaceChoice | None) -> str:
    return "none" if choice is None else str(choice)
