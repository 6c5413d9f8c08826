"""The interpreter: old, or started with options that change what it imports."""

from __future__ import annotations

from ddpcheck.doctor.context import DoctorContext
from ddpcheck.doctor.diagnosis import Diagnosis, Level
from ddpcheck.doctor.facts.record import Facts

NAME = "python"
_OLDEST = (3, 10)


def find(scene: DoctorContext) -> list[Diagnosis]:
    return scene.by_rank(_look)


def _look(facts: Facts) -> list[Diagnosis]:
    python = facts.python
    if python.get("error"):
        return [
            Diagnosis(
                NAME,
                Level.PROBLEM,
                f"Python does not answer: {python['error']}.",
                "Ranks are started with it.",
                "Name another one with --python.",
            )
        ]
    found = [*_old(str(python.get("version", ""))), *_options(facts)]
    return found or [Diagnosis(NAME, Level.OK, f"{python.get('version')}, {python.get('executable')}")]


def _old(version: str) -> list[Diagnosis]:
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if len(numbers) < 2 or numbers >= _OLDEST:
        return []
    return [
        Diagnosis(
            NAME,
            Level.PROBLEM,
            f"This is Python {version}.",
            "ddpcheck watches ranks from Python 3.10 on.",
            "Use a newer Python for the job.",
        )
    ]


def _options(facts: Facts) -> list[Diagnosis]:
    flags = facts.python.get("flags") or {}
    found = []
    if flags.get("safe_path") and not flags.get("isolated"):
        found.append(
            Diagnosis(
                NAME,
                Level.NOTE,
                "The folder of a script is not on its import path (PYTHONSAFEPATH or -P).",
                "A training script that imports a file beside it fails, on this host and not on others.",
                "Unset PYTHONSAFEPATH, or put the folder on PYTHONPATH.",
            )
        )
    if flags.get("optimize"):
        found.append(
            Diagnosis(
                NAME,
                Level.NOTE,
                "Python runs with -O or PYTHONOPTIMIZE: assertions are left out.",
                "What a training script asserts of its data or its ranks is not looked at.",
                "Unset PYTHONOPTIMIZE unless that is wanted.",
            )
        )
    return found
