"""Whether a run folder can be written, and has room."""

from __future__ import annotations

from ddpcheck.doctor.context import DoctorContext
from ddpcheck.doctor.diagnosis import Diagnosis, Level
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.formatting import size_text

NAME = "run folder"
_NO_ROOM = 64 << 20
_LITTLE_ROOM = 1 << 30


def find(scene: DoctorContext) -> list[Diagnosis]:
    return scene.by_host(_look)


def _look(facts: Facts) -> list[Diagnosis]:
    folder = facts.folder
    if not folder:
        return []
    fix = "Choose another place with `ddpcheck run --out DIR`."
    if not folder.get("writable"):
        reason = folder.get("reason") or folder.get("error") or "unknown"
        return [
            Diagnosis(
                NAME,
                Level.PROBLEM,
                f"No run folder can be made: {reason}.",
                "`ddpcheck run` writes the records of all ranks there, and would not start.",
                fix,
            )
        ]
    free = int(folder.get("free", 0))
    if free >= _LITTLE_ROOM:
        kind = f" ({folder['kind']})" if folder.get("kind") else ""
        return [Diagnosis(NAME, Level.OK, f"can be written, {size_text(free)} free{kind}")]
    return [
        Diagnosis(
            NAME,
            Level.PROBLEM if free < _NO_ROOM else Level.WARNING,
            f"Only {size_text(free)} are free where the run folder would be.",
            "Records stop where the disk is full, and so do the job's own checkpoints.",
            f"Make room. {fix}",
        )
    ]
