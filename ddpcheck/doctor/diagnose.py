"""All checks, listed in one place, and what they say put together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import ModuleType

from ddpcheck.doctor.checks import (
    clocks,
    differences,
    gpu_sharing,
    gpus,
    hostname,
    injection,
    interfaces,
    interpreter,
    limits,
    memory,
    networks,
    processors,
    reachable,
    roll_call,
    run_folder,
    shared_memory,
    torch_build,
    variables,
)
from ddpcheck.doctor.context import Scene
from ddpcheck.doctor.diagnosis import Diagnosis, Level

# In the order in which the report tells what is as it should be.
CHECKS: tuple[ModuleType, ...] = (
    roll_call,
    interpreter,
    torch_build,
    injection,
    run_folder,
    hostname,
    interfaces,
    networks,
    reachable,
    gpus,
    gpu_sharing,
    processors,
    memory,
    shared_memory,
    limits,
    variables,
    differences,
    clocks,
)


def diagnose(scene: Scene) -> tuple[Diagnosis, ...]:
    """The worst first; a check that has nothing to look at says nothing."""
    found = [one for check in CHECKS for one in _of_check(check.find(scene))]
    return tuple(sorted(found, key=lambda one: one.level.place))


def _of_check(found: Iterable[Diagnosis]) -> list[Diagnosis]:
    """Equal sentences of several hosts become one; what is well is not told beside what is not."""
    merged: dict[tuple[Level, str, str], Diagnosis] = {}
    for one in found:
        key = (one.level, one.what, one.fix)
        known = merged.get(key)
        merged[key] = one if known is None else _joined(known, one)
    bad = [one for one in merged.values() if one.level is not Level.OK]
    return bad or list(merged.values())


def _joined(one: Diagnosis, other: Diagnosis) -> Diagnosis:
    return replace(
        one,
        hosts=tuple(dict.fromkeys((*one.hosts, *other.hosts))),
        ranks=tuple(sorted({*one.ranks, *other.ranks})),
    )
