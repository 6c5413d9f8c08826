"""Which interface gloo and NCCL take, and whether the variables that choose it make sense here."""

from __future__ import annotations

from ddpcheck.doctor.context import DoctorContext
from ddpcheck.doctor.diagnosis import Diagnosis, Level
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.doctor.interface_selection import (
    GLOO_VARIABLE,
    NCCL_VARIABLE,
    Choice,
    gloo_choice,
    gloo_names,
    interface_named,
    nccl_choice,
    speed_text,
)

NAME = "interfaces"
# Less than this between two speeds is not worth a word.
_TIMES_FASTER = 2.0
_DOWN = "is down"


def find(scene: DoctorContext) -> list[Diagnosis]:
    return scene.by_rank(lambda facts: _look(facts, scene.spans_hosts))


def _look(facts: Facts, across: bool) -> list[Diagnosis]:
    found = [*_gloo(facts, across), *_nccl(facts, across)]
    if not across:  # with several hosts, those networks count that connect them
        found += _faster(facts)
    return found or [Diagnosis(NAME, Level.OK, _line(facts))]


def _gloo(facts: Facts, across: bool) -> list[Diagnosis]:
    error = (facts.torch.get("gloo_takes") or {}).get("error")
    for name in gloo_names(facts):
        reason = _unusable(facts, name)
        # On one machine packets do not leave it, and a cable that is not plugged in does no harm.
        if reason and (across or error or reason != _DOWN):
            why = "gloo fails when the process group is made, or its ranks cannot connect."
            return [_wrong(facts, GLOO_VARIABLE, f"{name} {reason}", why)]
    if error:
        return [
            Diagnosis(
                NAME,
                Level.PROBLEM,
                f"gloo finds no interface: {error}.",
                "No process group with gloo can be made on this host.",
                f"Set {GLOO_VARIABLE} to an interface that is up and has an address.",
            )
        ]
    chosen = gloo_choice(facts)
    if across and chosen is not None and chosen.is_loopback and gloo_names(facts):
        why = "At the loopback's address no other host can connect."
        return [_wrong(facts, GLOO_VARIABLE, f"{chosen.name} is the loopback", why)]
    return []


def _nccl(facts: Facts, across: bool) -> list[Diagnosis]:
    if not facts.environment.get(NCCL_VARIABLE):
        return []
    chosen = nccl_choice(facts)
    if chosen is None:
        told, why = "no interface that is up and has an address fits it", "NCCL finds no way to other ranks."
    elif across and chosen.is_loopback:
        told, why = (
            f"it means {chosen.name}, the loopback",
            "At the loopback's address no other host can connect.",
        )
    else:
        return []
    return [_wrong(facts, NCCL_VARIABLE, told, why)]


def _wrong(facts: Facts, variable: str, told: str, why: str) -> Diagnosis:
    usable = [
        str(one["name"])
        for one in facts.interfaces
        if one.get("class") != "loopback" and one.get("running") and one.get("addresses")
    ]
    there = f"There is {', '.join(usable[:6])}." if usable else "There is none beside the loopback."
    return Diagnosis(
        NAME,
        Level.PROBLEM,
        f"{variable} is {facts.environment.get(variable)}, and {told}.",
        why,
        f"Set it to an interface that reaches the other hosts, or unset it. {there}",
    )


def _unusable(facts: Facts, name: str) -> str:
    if not facts.interfaces:
        return ""  # not known here
    known = interface_named(facts, name)
    if known is None:
        return "is no interface of this host"
    if not known.get("running", True):
        return _DOWN
    return "" if known.get("addresses") else "has no address"


def _faster(facts: Facts) -> list[Diagnosis]:
    chosen = gloo_choice(facts)
    if chosen is None or chosen.is_loopback or not chosen.speed:
        return []
    better = [
        one
        for one in facts.interfaces
        if one.get("running")
        and one.get("addresses")
        and (one.get("speed") or 0) >= _TIMES_FASTER * chosen.speed
    ]
    if not better:
        return []
    best = max(better, key=lambda one: int(one["speed"]))
    return [
        Diagnosis(
            NAME,
            Level.NOTE,
            f"gloo takes {chosen}; {best['name']} has {speed_text(best['speed'])}.",
            "If both lead to the other hosts, gradients take the slower way.",
            f"Set {GLOO_VARIABLE} and {NCCL_VARIABLE} to {best['name']} if it reaches the other hosts.",
        )
    ]


def _line(facts: Facts) -> str:
    told = [f"gloo takes {_name(gloo_choice(facts))}"]
    if facts.gpus.get("gpus") or facts.environment.get(NCCL_VARIABLE):
        told.append(f"NCCL {_name(nccl_choice(facts))} by its documentation")
    return "; ".join(told)


def _name(choice: Choice | None) -> str:
    return "none" if choice is None else str(choice)
