"""Whether ddpcheck reaches the Python of the ranks, and what keeps it out."""

from __future__ import annotations

from ddpcheck.doctor.context import DoctorContext
from ddpcheck.doctor.diagnosis import Diagnosis, Level
from ddpcheck.doctor.facts.record import Facts, Section

NAME = "injection"
_BY_HAND = "Otherwise put `import ddpcheck.auto` at the top of the script."
_OPTIONS = {"isolated": "-I", "ignore_environment": "-E", "no_site": "-S"}


def find(scene: DoctorContext) -> list[Diagnosis]:
    return scene.by_rank(_look)


def _look(facts: Facts) -> list[Diagnosis]:
    told = facts.injection
    if not told:
        return []  # nobody tried
    if told.get("armed"):
        also = f"; {told['sitecustomize']} runs as well" if told.get("sitecustomize") else ""
        return [Diagnosis(NAME, Level.OK, f"ddpcheck gets into {told.get('into')}{also}")]
    what, fix = _kept_out_by(told)
    return [
        Diagnosis(
            NAME,
            Level.PROBLEM,
            f"ddpcheck does not get into {told.get('into', 'the rank')}: {what}.",
            "`ddpcheck run` would see no rank (DDP601).",
            f"{fix} {_BY_HAND}",
            evidence=dict(told),
        )
    ]


def _kept_out_by(told: Section) -> tuple[str, str]:
    flags = [_OPTIONS[flag] for flag in told.get("flags", ()) if flag in _OPTIONS]
    if told.get("error"):
        return str(told["error"]), "See that this Python starts."
    if "-I" in flags or "-E" in flags:
        option = "-I" if "-I" in flags else "-E"
        return f"Python runs with {option}, which ignores PYTHONPATH", f"Start it without {option}."
    if flags:
        return "Python runs with -S, which imports no sitecustomize", "Start it without -S."
    if not told.get("first_on_path"):
        return (
            "the folder that ddpcheck put first on PYTHONPATH is not first there any more",
            "A wrapper, a module file or the launcher (srun --export) sets PYTHONPATH: let it add to what is there.",
        )
    if told.get("sitecustomize"):
        return (
            f"{told['sitecustomize']} is imported in the place of ddpcheck's",
            "Take that file off the path, or let it be found after PYTHONPATH.",
        )
    return (
        "its folder cannot be read there",
        "Install ddpcheck at a path that every host and container has, the same one on all.",
    )
