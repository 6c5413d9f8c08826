"""What the doctor found, as `--json` prints it and as ranks hand it to the launcher."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ddpcheck.doctor.context import Call, Clock, Scene
from ddpcheck.doctor.diagnose import diagnose
from ddpcheck.doctor.diagnosis import Diagnosis, Level
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.version import VERSION

# Version of the document. 1 (2026-11): first version.
DOCTOR_SCHEMA = 1


@dataclass(frozen=True)
class DoctorReport:
    """A scene and the diagnoses made of it."""

    scene: Scene
    diagnoses: tuple[Diagnosis, ...]

    @classmethod
    def of(cls, scene: Scene) -> DoctorReport:
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
        scene = Scene(
            facts=tuple(Facts.from_json(each) for each in raw["facts"]),
            world_size=raw["world_size"],
            missing=tuple(raw["missing"]),
            clocks=tuple(Clock(**each) for each in raw["clocks"]),
            calls=tuple(Call(**each) for each in raw["calls"]),
            apart=raw["apart"],
        )
        return cls(scene, tuple(_diagnosis(each) for each in raw["diagnoses"]))


def _diagnosis(raw: Mapping[str, Any]) -> Diagnosis:
    lists = {name: tuple(raw[name]) for name in ("hosts", "ranks")}
    return Diagnosis(**{**raw, **lists, "level": Level(raw["level"])})
