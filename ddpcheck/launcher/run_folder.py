"""Creates, joins or finds the folder of a run, and writes run.json and report.json.

On shared storage, `ddpcheck run --out DIR` on all nodes uses one folder: the first node creates the run, the others
join it. For a job that was not started by `ddpcheck run`, no launcher passes the ranks a folder, so each rank derives
the same one from its environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any

from ddpcheck.config import Config
from ddpcheck.errors import OutputFolderError
from ddpcheck.launcher.job_identity import (
    find_job_id,
    is_single_rank_of_job,
    launch_key,
    rank,
    spans_nodes,
    task_of_job,
)
from ddpcheck.launcher.process.process_table import process_start
from ddpcheck.privacy import mask_arguments
from ddpcheck.records.kinds.audit import AUDIT_FOLDER
from ddpcheck.records.reader import RUN_FILE, RUNS_FOLDER, is_run_folder, read_run_file
from ddpcheck.version import VERSION

# The nodes of one job start within this time, or the records of the others have grown within it.
_RECENT_SECONDS = 600.0


def may_join(folder: Path, run: Mapping[str, Any], name: str, job: str, command: Sequence[str]) -> bool:
    """Whether the run in `folder` has not ended and is the same job on another node.

    Jobs with an id are compared by it. Without an id, the command or the scheduler must request several nodes.
    """
    if "ended" in run or run.get("name") != name or run.get("job", "") != job:
        return False
    if not job and not (spans_nodes(command, os.environ) or is_single_rank_of_job(os.environ)):
        return False
    if run.get("host") == os.uname().nodename:
        # Several launchers on one host, as in a test setup: the launcher that created the run must still exist.
        pid = run.get("pid")
        return isinstance(pid, int) and process_start(pid) == run.get("pid_start")
    return _was_modified_recently(folder)


def _was_modified_recently(folder: Path) -> bool:
    try:
        newest = max(path.stat().st_mtime for path in folder.iterdir())
    except (OSError, ValueError):
        return False
    return time.time() - newest < _RECENT_SECONDS


# Version of run.json. 1 (2026-11): first version.
RUN_SCHEMA = 1
_MODULE_OPTIONS = {"-m", "--module"}
_LAUNCHER_MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
_MAX_NAME_LENGTH = 40


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run. A node that joined the run of another node does not write run.json."""

    path: Path
    run_id: str
    name: str
    joined: bool = False
    # Id of the job, the same on all its nodes; empty: unknown.
    job: str = ""


def make_run_folder(
    command: Sequence[str], *, out: Path | None = None, name: str = "", job_id: str = ""
) -> RunFolder:
    """Create `ddpcheck-runs/<time>-<name>/`, or exactly `out`, accessible to its owner only.

    An explicit job id names the folder: nodes that share a file system find the same folder without `out`.
    """
    name = run_name([name]) if name else run_name(command)
    job = find_job_id(job_id, command, os.environ)
    parent = Path(RUNS_FOLDER).absolute()
    if out is not None or job_id:
        return _use_folder(parent / run_name([job_id]) if out is None else out.absolute(), name, job, command)
    stem = f"{time.strftime('%Y%m%d-%H%M%S')}-{name}"
    task = task_of_job(os.environ)
    if job and task is not None:
        return _folder_of_task(parent, stem, name, job, task)
    for suffix in ["", *(f"-{number}" for number in range(2, 1000))]:
        path = parent / (stem + suffix)
        if make_folder(path):
            return RunFolder(path, path.name, name, job=job)
    raise OutputFolderError(f"{parent}: too many runs started in this second; choose a folder with --out")


def _folder_of_task(parent: Path, stem: str, name: str, job: str, task: int) -> RunFolder:
    """srun and mpirun start one launcher for each rank: all of them use the folder that the first one proposes.

    A job may start several runs, one after the other. A task that has used a folder, or finds its run ended, takes the
    next one.
    """
    make_folder(parent)
    for number in range(1, _MAX_RUNS):
        agreed = _agree(
            parent / f".job-{_short_hash(job)}-{number}", f"{stem}-{_short_hash(f'{job} {number}')}"
        )
        path = parent / agreed
        make_folder(path)
        claimed = _create_empty(path / f".claim-{task}")
        if claimed and "ended" not in read_run_file(path):
            return RunFolder(path, job, name, job=job)
    raise OutputFolderError(f"{parent}: too many runs of job {job}; choose a folder with --out")


def _agree(path: Path, proposal: str) -> str:
    """The first text that any process proposed for this file."""
    temporary = path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}")
    try:
        temporary.write_text(proposal)
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
        return path.read_text()
    except OSError as error:
        raise _unusable(path, f"cannot be written: {_reason(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _create_empty(path: Path) -> bool:
    """Create a file; False if it exists."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    except OSError as error:
        raise _unusable(path.parent, f"cannot be written: {_reason(error)}") from error
    return True


def run_name(command: Sequence[str]) -> str:
    """`train` for `torchrun --nproc 4 train.py`. The result is valid in a file name."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", _script_name(command)).strip("-.")
    return name[:_MAX_NAME_LENGTH] or "run"


def _script_name(command: Sequence[str]) -> str:
    for argument in command:
        if argument.endswith((".py", ".sh")) and not argument.startswith("-"):
            return PurePath(argument).stem
    for option, module in pairwise(command):
        if option in _MODULE_OPTIONS and module not in _LAUNCHER_MODULES and re.fullmatch(r"[\w.]+", module):
            return module.removesuffix(".__main__").rsplit(".", 1)[-1]
    return PurePath(command[0]).name if command else ""


def _use_folder(path: Path, name: str, job: str, command: Sequence[str]) -> RunFolder:
    if make_folder(path):
        return RunFolder(path, job or path.name, name, job=job)
    if not path.is_dir():
        raise _unusable(path, "is a file, not a folder")
    run = read_run_file(path)
    if run and may_join(path, run, name, job, command):
        return RunFolder(path, str(run.get("id", path.name)), name, joined=True, job=job)
    if is_run_folder(path):
        raise OutputFolderError(
            f"{path}: already contains a run; choose another folder with --out, or remove that run first"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        raise _unusable(path, "cannot be written: permission denied")
    if _is_foreign(path):
        raise OutputFolderError(
            f"{path}: contains other files and no run; give a new or an empty folder with --out, such as {path / 'run'}"
        )
    return RunFolder(path, job or path.name, name, job=job)


def _is_foreign(path: Path) -> bool:
    """Whether a folder holds files of others only. Another node may be about to begin the run: its files are hidden."""
    names = [entry.name for entry in os.scandir(path) if not entry.name.startswith(".")]
    return bool(names) and not any(name == RUN_FILE or name.startswith(("node-", "rank-")) for name in names)


def make_folder(path: Path) -> bool:
    """Create the folder and its parents; False if the name is in use."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
        path.chmod(0o700)  # the umask may have removed permissions
        return True
    except FileExistsError as error:
        if not path.parent.is_dir():
            raise _unusable(path, f"cannot be created: {path.parent} is a file") from error
        return False
    except OSError as error:
        raise _unusable(path, f"cannot be created: {_reason(error)}") from error


def begin_run(folder: RunFolder, command: Sequence[str], config: Config) -> RunFolder:
    """Write run.json. The result has `joined` set if another node was first."""
    record = {
        "schema": RUN_SCHEMA,
        "id": folder.run_id,
        "job": folder.job,
        "name": folder.name,
        "command": mask_arguments(command),
        "cwd": os.getcwd(),
        "started": _now(),
        "ddpcheck": VERSION,
        **(_own_process() if config.own_launcher else {}),
        "config": config.rank_settings(),
    }
    if folder.joined or not _create_file(folder.path / RUN_FILE, record):
        run = read_run_file(folder.path)
        return replace(folder, run_id=str(run.get("id", folder.run_id)), joined=True)
    return folder


def _own_process() -> dict[str, Any]:
    """The launcher, by which others recognise whether it still exists."""
    pid = os.getpid()
    return {"host": os.uname().nodename, "pid": pid, "pid_start": process_start(pid)}


def has_own_launcher(run: Mapping[str, Any]) -> bool:
    """Whether `ddpcheck run` has started the ranks of the run with this run.json."""
    settings = run.get("config")
    return not isinstance(settings, dict) or settings.get("own_launcher") is not False


def can_still_grow(folder: Path, run: Mapping[str, Any]) -> bool:
    """Whether ranks that another program starts may still write into this folder."""
    return bool(run) and "ended" not in run and not has_own_launcher(run) and _was_modified_recently(folder)


def finish_run(
    folder: RunFolder,
    exit_code: int | None,
    seconds: float,
    stopped: str = "",
    unwritten: int = 0,
    interrupted: bool = False,
) -> dict[str, Any]:
    """Add how the run ended to run.json, and return all of it. If the disk is full, run.json stays as it is.

    Removes the micro-batches that ranks have handed over to each other: they contain samples.
    """
    shutil.rmtree(folder.path / AUDIT_FOLDER, ignore_errors=True)
    ending = {"exit_code": exit_code, "ended": _now(), "seconds": round(seconds, 3), "stopped": stopped}
    if interrupted:
        ending["interrupted"] = True
    if unwritten:  # lines missing from the log of this node
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
    return record


def _create_file(path: Path, record: dict[str, Any]) -> bool:
    """Write a file that must not exist yet. Other processes never see it incomplete."""
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
        raise _unusable(path, f"cannot be written: {_reason(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def _write_new(path: Path, record: dict[str, Any]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        os.fchmod(descriptor, 0o600)
        json.dump(record, file, indent=1)
        file.write("\n")


def _unusable(path: Path, reason: str) -> OutputFolderError:
    return OutputFolderError(f"{path}: {reason}; choose another folder with --out")


def _reason(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _now() -> str:
    return datetime.now().astimezone().isoformat(timespec="seconds")


_MAX_RUNS = 1000


def find_job_folder(base: Path, command: Sequence[str], environ: Mapping[str, str] = os.environ) -> RunFolder:
    """The job's folder under `base`/ddpcheck-runs. The first rank creates it."""
    name = run_name(command[1:] or command)
    parent = base / RUNS_FOLDER
    parent.mkdir(parents=True, exist_ok=True)
    key = launch_key(environ)
    if spans_nodes((), environ):
        return _claim(parent, f"job-{_short_hash(key)}-{name}", name, environ)
    pid = os.getppid() if rank(environ) is not None else os.getpid()
    started = process_start(pid) or 0
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(_unix_time(started)))
    path = parent / f"{stamp}-{name}-{_short_hash(f'{key} {pid} {started}')}"
    _make(path)
    return RunFolder(path, path.name, name)


def _claim(parent: Path, stem: str, name: str, environ: Mapping[str, str]) -> RunFolder:
    """Across nodes, ranks have no common parent process, so a second run of a job looks like the first.

    Each rank therefore creates a claim file in a folder, and uses the next folder if the claim exists.
    """
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    claim = f".claim-{rank(environ) or 0}-{attempt}"
    for number in range(1, _MAX_RUNS):
        path = parent / (stem if number == 1 else f"{stem}-{number}")
        next_path = parent / f"{stem}-{number + 1}"
        if attempt != "0" and next_path.exists():
            continue  # a restart belongs to the latest run
        _make(path)
        if _create_empty(path / claim):
            return RunFolder(path, path.name, name)
    raise OSError(f"{parent} contains too many runs of {stem}; remove some of them")


def _make(path: Path) -> None:
    path.mkdir(mode=0o700, exist_ok=True)
    path.chmod(0o700)


def _short_hash(key: str) -> str:
    return hashlib.blake2s(key.encode(errors="surrogateescape"), digest_size=4).hexdigest()


def _unix_time(ticks: int) -> float:
    """Ticks since boot as seconds since 1970; the same second in all processes of a node."""
    try:
        with open("/proc/stat") as file:
            boot = next(int(line.split()[1]) for line in file if line.startswith("btime"))
    except (OSError, StopIteration, ValueError):
        return 0.0
    return boot + ticks // os.sysconf("SC_CLK_TCK")
