"""Finds the run folder that the user refers to."""

from __future__ import annotations

from pathlib import Path

from ddpcheck.errors import RunNotFound, UsageError
from ddpcheck.records.reader import RUNS_FOLDER, is_run_folder

_MAX_LISTED = 5


def find_run(given: str | None, runs: Path = Path(RUNS_FOLDER)) -> Path:
    """A run folder given by its path, by its name or the beginning of it in `runs`, or the latest run there."""
    if given is None:
        return _latest(runs)
    if given and is_run_folder(Path(given)):
        return Path(given)
    matches = _named(given, runs)
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise UsageError(
            f"{given!r} matches {len(matches)} runs in {runs}: {_listed(matches)}; give more of the name"
        )
    if given and Path(given).exists():
        raise RunNotFound(f"{given!r} is not a run folder: it contains neither run.json nor rank-*.jsonl")
    raise RunNotFound(f"there is no run {given!r}, neither as a folder nor in {runs}{_available(runs)}")


def _latest(runs: Path) -> Path:
    matches = _all(runs)
    if not matches:
        raise RunNotFound(
            f"there is no run in {runs}; create one with `ddpcheck run -- COMMAND`, or give a run folder"
        )
    return matches[-1]


def _named(given: str, runs: Path) -> list[Path]:
    if not given:
        return []
    all_runs = _all(runs)
    # Folder names begin with the time; users remember the name that follows.
    exact = [run for run in all_runs if given == run.name or run.name.endswith(f"-{given}")]
    return exact or [run for run in all_runs if run.name.startswith(given)]


def _all(runs: Path) -> list[Path]:
    """Oldest first: names begin with the time they started."""
    return sorted((path for path in runs.glob("*") if is_run_folder(path)), key=lambda path: path.name)


def _available(runs: Path) -> str:
    matches = _all(runs)
    return f", which contains {_listed(matches)}" if matches else ""


def _listed(matches: list[Path]) -> str:
    latest = [path.name for path in reversed(matches)][:_MAX_LISTED]
    more = len(matches) - len(latest)
    return ", ".join(latest) + (f" and {more} more" if more else "")
