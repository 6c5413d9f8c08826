"""Joins the run folders that the nodes of one job have each written for themselves."""

from __future__ import annotations

import filecmp
import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddpcheck.analysis.run_reader import by_start
from ddpcheck.errors import NotOneJob, OutputFolderError, RunNotFound
from ddpcheck.launcher.run_folder import RUN_FILE, RUNS_FOLDER, make_folder, read_run_file
from ddpcheck.records.kinds.rank import RankHeader
from ddpcheck.records.reader import RecordFile
from ddpcheck.records.registry import RANK_FILES
from ddpcheck.records.session_name import of_one_job

# Made anew for the whole.
_LEFT_OUT = {RUN_FILE, "report.json"}


def merge(sources: Sequence[Path], out: Path | None = None) -> Path:
    """Copy the records of all `sources` into one new run folder; they themselves stay as they are."""
    headers = {source: _headers(source) for source in dict.fromkeys(source.resolve() for source in sources)}
    _check_one_job(headers)
    target = _target(list(headers), out)
    for source, files in headers.items():
        _copy_ranks(files, target)
        _copy_rest(source, target)
    description = _description(headers)
    (target / RUN_FILE).write_text(json.dumps({**description, "id": target.name}, indent=1) + "\n")
    return target


def _headers(source: Path) -> dict[Path, RankHeader]:
    """The rank files of a folder, each with its first record; in the order in which they were opened."""
    if not source.is_dir():
        raise RunNotFound(f"there is no run folder {source}")
    found: dict[Path, RankHeader] = {}
    for path in sorted(source.glob(RANK_FILES), key=by_start):
        first = next(iter(RecordFile(path).read(1)), None)
        if isinstance(first, RankHeader):
            found[path] = first
    if not found:
        raise RunNotFound(f"no rank has left records in {source}")
    return found


def _check_one_job(headers: dict[Path, dict[Path, RankHeader]]) -> None:
    (first, known), *rest = headers.items()
    for source, files in rest:
        if not any(of_one_job(a.session, b.session) for a in known.values() for b in files.values()):
            raise NotOneJob(
                f"{first} and {source} are not of one job: their ranks never met in one rendezvous. Compare runs "
                "of different jobs with `ddpcheck diff`"
            )


def _target(sources: Sequence[Path], out: Path | None) -> Path:
    if out is None:
        name = str(read_run_file(sources[0]).get("name") or "run")
        out = Path(RUNS_FOLDER) / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-merged"
    target = out.absolute()
    if not make_folder(target) and (not target.is_dir() or any(target.iterdir())):
        raise OutputFolderError(f"{target}: is there already; choose a new place with --out")
    return target


def _copy_ranks(files: dict[Path, RankHeader], target: Path) -> None:
    """A rank that was on one node first and on another after a restart has files of the same name."""
    for path, header in files.items():
        for number in range(10_000):
            place = target / f"rank-{header.rank:05d}{f'.{number}' if number else ''}.jsonl"
            if not place.exists():
                shutil.copyfile(path, place)
                place.chmod(0o600)
                break
            if filecmp.cmp(path, place, shallow=False):
                break  # the same file, by another way


def _copy_rest(source: Path, target: Path) -> None:
    for path in sorted(source.rglob("*")):
        place = target / path.relative_to(source)
        if path.is_dir() and not path.is_symlink():
            place.mkdir(mode=0o700, exist_ok=True)
        elif not path.is_file() or path.name.startswith(".") or path.name in _LEFT_OUT:
            continue
        elif path.parent != source or not path.match(RANK_FILES):
            _copy_or_add(path, place)


def _copy_or_add(path: Path, place: Path) -> None:
    """Logs of launchers on hosts of one name go on in one file."""
    if not place.exists():
        shutil.copyfile(path, place)
        place.chmod(0o600)
    elif place.suffix == ".jsonl" and not filecmp.cmp(path, place, shallow=False):
        with place.open("ab") as file:
            file.write(path.read_bytes())


def _description(headers: dict[Path, dict[Path, RankHeader]]) -> dict[str, Any]:
    """run.json of the node of rank 0, with how the job ended as a whole."""
    runs = {source: read_run_file(source) for source in headers}
    first = next(
        (source for source, files in headers.items() if any(h.rank == 0 for h in files.values())),
        next(iter(headers)),
    )
    told = {**runs[first], "merged": [str(source) for source in headers]}
    every = [run for run in runs.values() if run]
    if len(every) == len(runs) and all("ended" in run for run in every):
        told["exit_code"] = next((run["exit_code"] for run in every if run.get("exit_code")), 0)
        told["stopped"] = next((run["stopped"] for run in every if run.get("stopped")), "")
        told["seconds"] = max(run.get("seconds") or 0 for run in every)
    else:
        # Not the end of the job, but of one node's part.
        told.pop("ended", None)
        told.pop("exit_code", None)
    return told
