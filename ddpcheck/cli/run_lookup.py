"""Which run folder the user means."""

from __future__ import annotations

from pathlib import Path

from ddpcheck.errors import RunNotFound, UsageError
from ddpcheck.launcher.run_folder import RUNS_FOLDER

_MOST_SHOWN = 5


def find_run(given: str | None, runs: Path = Path(RUNS_FOLDER)) -> Path:
    """A folder as it is, a name or the beginning of one inside `runs`, or the latest run there."""
    if given is None:
        return _latest(runs)
    if given and is_run(Path(given)):
        return Path(given)
    found = _named(given, runs)
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(
            f"{given!r} means {len(found)} runs in {runs}: {_listed(found)}; say more of the name"
        )
    if given and Path(given).exists():
        raise RunNotFound(f"{given!r} is not a run folder: there is neither run.json nor rank-*.jsonl in it")
    raise RunNotFound(f"there is no run {given!r}, neither as a folder nor in {runs}{_available(runs)}")


def is_run(path: Path) -> bool:
    """Whether something was recorded in this folder, however little."""
    return path.is_dir() and ((path / "run.json").exists() or any(path.glob("rank-*.jsonl")))


def _latest(runs: Path) -> Path:
    found = _all(runs)
    if not found:
        raise RunNotFound(
            f"there is no run in {runs}: make one with `ddpcheck run -- COMMAND`, or name a run folder"
        )
    return found[-1]


def _named(given: str, runs: Path) -> list[Path]:
    if not given:
        return []
    every = _all(runs)
    # Folder names begin with the time, so people remember what comes after it.
    exact = [run for run in every if given == run.name or run.name.endswith(f"-{given}")]
    return exact or [run for run in every if run.name.startswith(given)]


def _all(runs: Path) -> list[Path]:
    """Oldest first: names begin with the time they started."""
    return sorted((path for path in runs.glob("*") if is_run(path)), key=lambda path: path.name)


def _available(runs: Path) -> str:
    found = _all(runs)
    return f", which holds {_listed(found)}" if found else ""


def _listed(found: list[Path]) -> str:
    latest = [path.name for path in reversed(found)][:_MOST_SHOWN]
    more = len(found) - len(latest)
    return ", ".join(latest) + (f" and {more} more" if more else "")
