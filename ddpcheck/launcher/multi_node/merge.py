"""Merges the run folders that the nodes of one job have written separately."""

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
from ddpcheck.launcher.run_folder import make_folder, run_name
from ddpcheck.records.folding import further_files
from ddpcheck.records.kinds.rank import RankHeader, is_same_job
from ddpcheck.records.reader import REPORT_FILE, RUN_FILE, RUNS_FOLDER, RecordFile, read_run_file
from ddpcheck.records.registry import FOLDED_SUFFIX, PART_SUFFIX, RANK_FILES, RECENT_SUFFIX

# Written again for the merged run.
_NOT_COPIED = {RUN_FILE, REPORT_FILE}
_BESIDE_RANK_FILES = tuple(f"rank-*{suffix}*" for suffix in (RECENT_SUFFIX, PART_SUFFIX, FOLDED_SUFFIX))


def merge_runs(sources: Sequence[Path], out: Path | None = None) -> Path:
    """Copy the records of all `sources` into one new run folder; the sources stay unchanged."""
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
    """The rank files of a folder with their headers, in the order in which they were created."""
    if not source.is_dir():
        raise RunNotFound(f"there is no run folder {source}; check the path")
    headers: dict[Path, RankHeader] = {}
    for path in sorted(source.glob(RANK_FILES), key=by_start):
        first = next(iter(RecordFile(path).read(1)), None)
        if isinstance(first, RankHeader):
            headers[path] = first
    if not headers:
        raise RunNotFound(f"{source} contains no rank records; give the run folder of each node")
    return headers


def _check_one_job(headers: dict[Path, dict[Path, RankHeader]]) -> None:
    (first, known), *rest = headers.items()
    for source, files in rest:
        if not any(is_same_job(a.session, b.session) for a in known.values() for b in files.values()):
            raise NotOneJob(
                f"{first} and {source} belong to different jobs: their ranks never joined one process group. "
                "To compare runs of different jobs, use `ddpcheck diff`"
            )


def _target(sources: Sequence[Path], out: Path | None) -> Path:
    if out is None:
        # The name comes from a file: it must not lead out of the folder.
        name = run_name([str(read_run_file(sources[0]).get("name") or "run")])
        out = Path(RUNS_FOLDER) / f"{time.strftime('%Y%m%d-%H%M%S')}-{name}-merged"
    target = out.absolute()
    if not make_folder(target) and (not target.is_dir() or any(target.iterdir())):
        raise OutputFolderError(f"{target}: already exists and is not empty; choose a new folder with --out")
    return target


def _copy_ranks(files: dict[Path, RankHeader], target: Path) -> None:
    """A rank that moved to another node after a restart has files of the same name on both."""
    for path, header in files.items():
        for number in range(10_000):
            destination = target / f"rank-{header.rank:05d}{f'.{number}' if number else ''}.jsonl"
            if not destination.exists():
                shutil.copyfile(path, destination)
                destination.chmod(0o600)
                recent = path.with_suffix(RECENT_SUFFIX)
                for further in (*further_files(path), *([recent] if recent.exists() else [])):
                    copy = destination.with_suffix(further.suffix)
                    shutil.copyfile(further, copy)
                    copy.chmod(0o600)
                break
            if filecmp.cmp(path, destination, shallow=False):
                break  # the same file was given twice


def _copy_rest(source: Path, target: Path) -> None:
    for path in sorted(source.rglob("*")):
        destination = target / path.relative_to(source)
        if destination.parent == target and path.name in _NOT_COPIED:
            continue
        if path.is_dir() and not path.is_symlink():
            destination.mkdir(mode=0o700, exist_ok=True)
        elif not path.is_file() or path.name.startswith("."):
            continue
        elif path.parent != source or not any(map(path.match, (RANK_FILES, *_BESIDE_RANK_FILES))):
            _copy_or_append(path, destination)


def _copy_or_append(path: Path, destination: Path) -> None:
    """Logs of launchers on hosts with the same name are concatenated."""
    if not destination.exists():
        shutil.copyfile(path, destination)
        destination.chmod(0o600)
    elif destination.suffix == ".jsonl" and not filecmp.cmp(path, destination, shallow=False):
        with destination.open("ab") as file:
            file.write(path.read_bytes())


def _description(headers: dict[Path, dict[Path, RankHeader]]) -> dict[str, Any]:
    """run.json of the node of rank 0, with the end of the whole job."""
    runs = {source: read_run_file(source) for source in headers}
    first = next(
        (source for source, files in headers.items() if any(h.rank == 0 for h in files.values())),
        next(iter(headers)),
    )
    merged = {**runs[first], "merged": [str(source) for source in headers]}
    every = [run for run in runs.values() if run]
    if len(every) == len(runs) and all("ended" in run for run in every):
        merged["exit_code"] = next((run["exit_code"] for run in every if run.get("exit_code")), 0)
        merged["stopped"] = next((run["stopped"] for run in every if run.get("stopped")), "")
        merged["seconds"] = max(run.get("seconds") or 0 for run in every)
    else:
        # At least one node has no end: the end of the job is unknown.
        merged.pop("ended", None)
        merged.pop("exit_code", None)
    return merged
