"""The folder of one run and its run.json."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any

from ddpcheck.analysis.report import Report
from ddpcheck.config import Config
from ddpcheck.errors import OutputFolderError
from ddpcheck.launcher.multi_node.shared_run import may_join
from ddpcheck.launcher.process.process_table import process_start
from ddpcheck.privacy import mask_arguments
from ddpcheck.version import VERSION

_MODULE_OPTIONS = {"-m", "--module"}
_LAUNCHER_MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
_LONGEST = 40


def run_name(command: Sequence[str]) -> str:
    """`train` for `torchrun --nproc 4 train.py`; always fit to be part of a file name."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", _script(command)).strip("-.")
    return name[:_LONGEST] or "run"


def _script(command: Sequence[str]) -> str:
    for argument in command:
        if argument.endswith((".py", ".sh")) and not argument.startswith("-"):
            return PurePath(argument).stem
    for option, module in pairwise(command):
        if option in _MODULE_OPTIONS and module not in _LAUNCHER_MODULES and re.fullmatch(r"[\w.]+", module):
            return module.removesuffix(".__main__").rsplit(".", 1)[-1]
    return PurePath(command[0]).name if command else ""


_RENDEZVOUS_OPTIONS = {"--rdzv-id", "--rdzv_id"}
_RENDEZVOUS_VARIABLE = "PET_RDZV_ID"
# By scheduler, what names a job and, of one that starts several things, which of them.
_SCHEDULERS = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ("PBS_JOBID",),
    ("LSB_JOBID",),
    ("FLUX_JOB_ID",),
)
# What torchrun calls a rendezvous that nobody named.
_UNNAMED = {"", "none"}


def job_id(given: str, command: Sequence[str], environ: Mapping[str, str]) -> str:
    """The same on all nodes of a job; empty where nothing names it."""
    return given or _of_rendezvous(command, environ) or _of_scheduler(environ)


def _of_rendezvous(command: Sequence[str], environ: Mapping[str, str]) -> str:
    for option, value in pairwise([*command, ""]):
        name, _, attached = option.partition("=")
        if name in _RENDEZVOUS_OPTIONS and (attached or value) not in _UNNAMED:
            return attached or value
    named = environ.get(_RENDEZVOUS_VARIABLE, "")
    return "" if named in _UNNAMED else named


def _of_scheduler(environ: Mapping[str, str]) -> str:
    for first, *others in _SCHEDULERS:
        if environ.get(first):
            return ".".join([environ[first], *(environ[name] for name in others if environ.get(name))])
    return ""


def write_report(report: Report, folder: Path) -> None:
    """A disk that is full by now costs this file, and is told."""
    from ddpcheck.reports.json_report import to_json
    from ddpcheck.reports.outputs import write_whole

    try:
        write_whole(folder / "report.json", to_json(report), mode=0o600)
    except OSError as error:
        sys.stderr.write(f"ddpcheck: report.json could not be written: {error.strerror} ({folder})\n")


# Version of run.json. 1 (2026-11): first version.
RUN_SCHEMA = 1
RUN_FILE = "run.json"
RUNS_FOLDER = "ddpcheck-runs"


@dataclass(frozen=True)
class RunFolder:
    """Where a run is kept. A node that joined a run of another node leaves run.json to that one."""

    path: Path
    run_id: str
    name: str
    joined: bool = False
    # What names the job on all its nodes; empty: nothing does.
    job: str = ""


def make_run_folder(
    command: Sequence[str], *, out: Path | None = None, name: str = "", run_id: str = ""
) -> RunFolder:
    """Make `ddpcheck-runs/<time>-<name>/`, or `out` exactly; readable by its owner only.

    With an id of its own a run is found by it: nodes that work in one folder meet there without `out`.
    """
    name = run_name([name]) if name else run_name(command)
    job = job_id(run_id, command, os.environ)
    parent = Path(RUNS_FOLDER).absolute()
    if out is not None or run_id:
        return _use_folder(parent / run_name([run_id]) if out is None else out.absolute(), name, job, command)
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    for suffix in ["", *(f"-{number}" for number in range(2, 1000))]:
        path = parent / (stem + suffix)
        if make_folder(path):
            return RunFolder(path, path.name, name, job=job)
    raise OutputFolderError(f"{parent}: holds too many runs of this second")


def begin_run(folder: RunFolder, command: Sequence[str], config: Config) -> RunFolder:
    """Write run.json; the folder comes back as joined where another node was first."""
    record = {
        "schema": RUN_SCHEMA,
        "id": folder.run_id,
        "job": folder.job,
        "name": folder.name,
        "command": mask_arguments(command),
        "cwd": os.getcwd(),
        "started": _now(),
        "ddpcheck": VERSION,
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "pid_start": process_start(os.getpid()),
        "config": asdict(config),
    }
    if folder.joined or not _create_file(folder.path / RUN_FILE, record):
        run = read_run_file(folder.path)
        return replace(folder, run_id=str(run.get("id", folder.run_id)), joined=True)
    return folder


def finish_run(
    folder: RunFolder, exit_code: int, seconds: float, stopped: str = "", unwritten: int = 0
) -> None:
    """Add how the run ended to run.json; a full disk by now costs only this."""
    ending = {"exit_code": exit_code, "ended": _now(), "seconds": round(seconds, 3), "stopped": stopped}
    if unwritten:  # lines of this node's log that are missing
        ending["unwritten"] = unwritten
    record = {**read_run_file(folder.path), **ending}
    temporary = folder.path / f".{RUN_FILE}.{os.getpid()}"
    try:
        temporary.unlink(missing_ok=True)
        _write_new(temporary, record)
        os.replace(temporary, folder.path / RUN_FILE)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def read_run_file(path: Path) -> dict[str, Any]:
    """run.json of the run in `path`; empty where it is missing or torn."""
    try:
        record = json.loads((path / RUN_FILE).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def _use_folder(path: Path, name: str, job: str, command: Sequence[str]) -> RunFolder:
    if make_folder(path):
        return RunFolder(path, job or path.name, name, job=job)
    if not path.is_dir():
        raise _impossible(path, "is a file, not a folder")
    run = read_run_file(path)
    if run and may_join(path, run, name, job, command):
        return RunFolder(path, str(run.get("id", path.name)), name, joined=True, job=job)
    if (path / RUN_FILE).exists() or any(path.glob("rank-*.jsonl")):
        raise OutputFolderError(
            f"{path}: already holds a run; choose another place with --out, or remove that run first"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise _impossible(path, "cannot be written: permission denied")
    return RunFolder(path, job or path.name, name, job=job)


def make_folder(path: Path) -> bool:
    """Make the folder and what is above it; False where there is something of that name."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
        path.chmod(0o700)  # whatever the umask took away
        return True
    except FileExistsError as error:
        if not path.parent.is_dir():
            raise _impossible(path, f"cannot be made: {path.parent} is a file") from error
        return False
    except OSError as error:
        raise _impossible(path, f"cannot be made: {_reason(error)}") from error


def _create_file(path: Path, record: dict[str, Any]) -> bool:
    """Write a file that must not exist yet, complete from the first moment it is seen."""
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        _write_new(temporary, record)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            _write_new(path, record)
        return True
    except FileExistsError:
        return False
    except OSError as error:
        raise _impossible(path, f"cannot be written: {_reason(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write_new(path: Path, record: dict[str, Any]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)
        json.dump(record, file, indent=1)
        file.write("\n")


def _impossible(path: Path, why: str) -> OutputFolderError:
    return OutputFolderError(f"{path}: {why}; choose another place with --out")


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")
