"""What the doctor found, as `--json` prints it and as ranks hand it to the launcher."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import Any

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
from ddpcheck.doctor.context import ConnectionAttempt, DoctorContext, HostClockOffset
from ddpcheck.doctor.diagnosis import Diagnosis, Level
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.version import VERSION

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


def diagnose(scene: DoctorContext) -> tuple[Diagnosis, ...]:
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


# Version of the document. 1 (2026-11): first version.
DOCTOR_SCHEMA = 1


@dataclass(frozen=True)
class DoctorReport:
    """A scene and the diagnoses made of it."""

    scene: DoctorContext
    diagnoses: tuple[Diagnosis, ...]

    @classmethod
    def of(cls, scene: DoctorContext) -> DoctorReport:
        return cls(scene, diagnose(scene))

    @property
    def has_problem(self) -> bool:
        return any(one.level is Level.PROBLEM for one in self.diagnoses)

    def to_json(self) -> str:
        document = {
            "schema": DOCTOR_SCHEMA,
            "ddpcheck": VERSION,
            "verdict": "problems" if self.has_problem else "ok",
            "world_size": self.scene.world_size,
            "hosts": [{"host": host.name, "ranks": list(host.ranks)} for host in self.scene.hosts],
            "diagnoses": [asdict(one) for one in self.diagnoses],
            "missing": list(self.scene.missing),
            "clocks": [asdict(clock) for clock in self.scene.clocks],
            "calls": [asdict(call) for call in self.scene.calls],
            "apart": self.scene.apart,
            "facts": [each.as_json() for each in self.scene.facts],
        }
        text = json.dumps(document, indent=1, allow_nan=False)
        return text.encode("utf-8", "backslashreplace").decode("utf-8") + "\n"

    @classmethod
    def from_json(cls, text: str) -> DoctorReport:
        raw = json.loads(text)
        scene = DoctorContext(
            facts=tuple(Facts.from_json(each) for each in raw["facts"]),
            world_size=raw["world_size"],
            missing=tuple(raw["missing"]),
            clocks=tuple(HostClockOffset(**each) for each in raw["clocks"]),
            calls=tuple(ConnectionAttempt(**each) for each in raw["calls"]),
            apart=raw["apart"],
        )
        return cls(scene, tuple(_diagnosis(each) for each in raw["diagnoses"]))


def _diagnosis(raw: Mapping[str, Any]) -> Diagnosis:
    lists = {name: tuple(raw[name]) for name in ("hosts", "ranks")}
    return Diagnosis(**{**raw, **lists, "level": Level(raw["level"])})
