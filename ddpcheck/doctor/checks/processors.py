"""Threads of the ranks against the processors they may use."""

from __future__ import annotations

import math

from ddpcheck.doctor.context import DoctorContext, Host
from ddpcheck.doctor.diagnosis import Diagnosis, Level
from ddpcheck.doctor.facts.record import Facts

NAME = "processors"
_VARIABLE = "OMP_NUM_THREADS"
# A share of the processors so small that somebody should know of it.
_MUCH_UNUSED = 8


def find(scene: DoctorContext) -> list[Diagnosis]:
    if not scene.is_job:
        return [_alone(scene.facts[0])]
    return [found for host in scene.hosts for found in _of_host(host)]


def _alone(facts: Facts) -> Diagnosis:
    usable = _usable([facts])
    there = facts.processors.get("all", 0)
    if usable < there and facts.processors.get("quota") is not None:
        return Diagnosis(
            NAME,
            Level.NOTE,
            f"The container may use {usable:g} of {there} processors' time.",
            "Programs see all of them, and start as many threads, which are then held up.",
            f"Set {_VARIABLE} to {max(1, int(usable))} divided by the ranks on this machine.",
        )
    return Diagnosis(NAME, Level.OK, f"{usable:g} of {there} may be used")


def _of_host(host: Host) -> list[Diagnosis]:
    usable = _usable(host.facts)
    threads = [int(each.torch.get("threads") or 0) for each in host.facts]
    ranks = len(host.facts)
    if not usable or not all(threads):
        return []
    each = " and ".join(sorted({str(count) for count in threads}))
    if sum(threads) > usable:
        return [
            Diagnosis(
                NAME,
                Level.WARNING,
                f"{_ranks(ranks)} of {each} threads share {usable:g} processors.",
                "Threads wait for each other, at every operation on a processor.",
                f"Set {_VARIABLE}={max(1, int(usable / ranks))}"
                + (", or start fewer ranks." if ranks > usable else "."),
                hosts=(host.name,),
                ranks=host.ranks,
            )
        ]
    on_gpus = any(facts.gpus.get("gpus") for facts in host.facts)
    if max(threads) == 1 and usable >= _MUCH_UNUSED * ranks and not on_gpus:
        return [
            Diagnosis(
                NAME,
                Level.NOTE,
                f"{_ranks(ranks)} of 1 thread leave most of {usable:g} processors unused.",
                f"torchrun sets {_VARIABLE}=1 for several ranks where nobody sets it.",
                f"Set {_VARIABLE}={int(usable / ranks)} if the job computes on processors.",
                hosts=(host.name,),
                ranks=host.ranks,
            )
        ]
    return [
        Diagnosis(
            NAME, Level.OK, f"{usable:g} for {_ranks(ranks)}, threads of each: {each}", hosts=(host.name,)
        )
    ]


def _usable(facts: list[Facts] | tuple[Facts, ...]) -> float:
    """All that any of them may run on, but not more than what their group gets."""
    allowed = {one for each in facts for one in each.processors.get("allowed", ())}
    quotas = [each.processors.get("quota") or math.inf for each in facts]
    return min(float(len(allowed)), min(quotas, default=math.inf))


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"
