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
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import pairwise
from pathlib import Path, PurePath
from typing import Any

from ddpcheck.analysis.report import Report
from ddpcheck.config import Config
from ddpcheck.errors import OutputFolderError
from ddpcheck.launcher.process.process_table import process_start
from ddpcheck.privacy import mask_arguments
from ddpcheck.records.kinds.audit import AUDIT_FOLDER
from ddpcheck.records.reader import REPORT_FILE, RUN_FILE, RUNS_FOLDER, is_run_folder, read_run_file
from ddpcheck.version import VERSION

# The nodes of one job start within this time, or the records of the others have grown within it.
_RECENT_SECONDS = 600.0
_NODE_COUNT_OPTIONS = {"--nnodes", "--num_machines", "--num-machines", "--num_nodes", "--num-nodes"}
_NODE_COUNT_VARIABLES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "NNODES", "PET_NNODES", "GROUP_WORLD_SIZE")


def may_join(folder: Path, run: Mapping[str, Any], name: str, job: str, command: Sequence[str]) -> bool:
    """Whether the run in `folder` has not ended and is the same job on another node.

    Jobs with an id are compared by it. Without an id, the command or the scheduler must request several nodes.
    """
    if "ended" in run or run.get("name") != name or run.get("job", "") != job:
        return False
    if not job and not (spans_nodes(command, os.environ) or _is_single_rank_of_job(os.environ)):
        return False
    if run.get("host") == os.uname().nodename:
        # Several launchers on one host, as in a test setup: the launcher that created the run must still exist.
        pid = run.get("pid")
        return isinstance(pid, int) and process_start(pid) == run.get("pid_start")
    return _was_modified_recently(folder)


def spans_nodes(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether the command line or the scheduler requests more than one node."""
    counts = [environ.get(name, "") for name in _NODE_COUNT_VARIABLES]
    for option, value in pairwise([*command, ""]):
        name, _, attached = option.partition("=")
        if name in _NODE_COUNT_OPTIONS:
            counts.append(attached or value)
    # "4", or "1:4" for an elastic job.
    return any(int(number) > 1 for count in counts for number in re.findall(r"\d+", count))


def _is_single_rank_of_job(environ: Mapping[str, str]) -> bool:
    """Whether this command is one rank of several, each started separately."""
    size = environ.get("WORLD_SIZE", "")
    return size.isdecimal() and int(size) > 1


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
_RENDEZVOUS_OPTIONS = {"--rdzv-id", "--rdzv_id"}
_RENDEZVOUS_VARIABLE = "PET_RDZV_ID"
# For each scheduler, the variables that identify a job and, within a job, a step and a restart.
_SCHEDULER_VARIABLES = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ("PBS_JOBID",),
    ("LSB_JOBID",),
    ("FLUX_JOB_ID",),
)
# The ids that torchrun uses if none was given.
_DEFAULT_RENDEZVOUS_IDS = {"", "none"}


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
    for suffix in ["", *(f"-{number}" for number in range(2, 1000))]:
        path = parent / (stem + suffix)
        if make_folder(path):
            return RunFolder(path, path.name, name, job=job)
    raise OutputFolderError(f"{parent}: too many runs started in this second; choose a folder with --out")


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


def find_job_id(given: str, command: Sequence[str], environ: Mapping[str, str]) -> str:
    """An id that is the same on all nodes of a job; empty if there is none."""
    return given or _rendezvous_id(command, environ) or _scheduler_id(environ)


def _rendezvous_id(command: Sequence[str], environ: Mapping[str, str]) -> str:
    for option, value in pairwise([*command, ""]):
        name, _, attached = option.partition("=")
        if name in _RENDEZVOUS_OPTIONS and (attached or value) not in _DEFAULT_RENDEZVOUS_IDS:
            return attached or value
    named = environ.get(_RENDEZVOUS_VARIABLE, "")
    return "" if named in _DEFAULT_RENDEZVOUS_IDS else named


def _scheduler_id(environ: Mapping[str, str]) -> str:
    for job, *details in _SCHEDULER_VARIABLES:
        if environ.get(job):
            return ".".join([environ[job], *(environ[name] for name in details if environ.get(name))])
    return ""


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
        "host": os.uname().nodename,
        "pid": os.getpid(),
        "pid_start": process_start(os.getpid()),
        "config": config.rank_settings(),
    }
    if folder.joined or not _create_file(folder.path / RUN_FILE, record):
        run = read_run_file(folder.path)
        return replace(folder, run_id=str(run.get("id", folder.run_id)), joined=True)
    return folder


def finish_run(
    folder: RunFolder,
    exit_code: int,
    seconds: float,
    stopped: str = "",
    unwritten: int = 0,
    interrupted: bool = False,
) -> None:
    """Add how the run ended to run.json. If the disk is full, run.json stays as it is.

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


def write_report(report: Report, folder: Path) -> None:
    """Write report.json; an error goes to stderr and does not end the command."""
    from ddpcheck.reports.json_report import to_json
    from ddpcheck.reports.outputs import write_whole

    try:
        write_whole(folder / REPORT_FILE, to_json(report), mode=0o600)
    except OSError as error:
        sys.stderr.write(f"ddpcheck: cannot write {folder / REPORT_FILE}: {error.strerror}\n")


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


_RANK_VARIABLES = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK", *_RANK_VARIABLES)
_JOB_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
)
_MAX_RUNS = 1000


def find_job_folder(base: Path, command: Sequence[str], environ: Mapping[str, str] = os.environ) -> RunFolder:
    """The job's folder under `base`/ddpcheck-runs. The first rank creates it."""
    name = run_name(command[1:] or command)
    parent = base / RUNS_FOLDER
    parent.mkdir(parents=True, exist_ok=True)
    key = "\n".join(environ.get(variable, "") for variable in _JOB_VARIABLES)
    if spans_nodes((), environ):
        return _claim(parent, f"job-{_short_hash(key)}-{name}", name, environ)
    pid = os.getppid() if rank(environ) is not None else os.getpid()
    started = process_start(pid) or 0
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(_unix_time(started)))
    path = parent / f"{stamp}-{name}-{_short_hash(f'{key} {pid} {started}')}"
    _make(path)
    return RunFolder(path, path.name, name)


def rank(environ: Mapping[str, str]) -> int | None:
    """The rank that the launcher assigned to this process; None in a process that starts ranks itself."""
    return _first_number(environ, _RANK_VARIABLES)


def local_rank(environ: Mapping[str, str]) -> int:
    return _first_number(environ, _LOCAL_RANK_VARIABLES) or 0


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
        try:
            os.close(os.open(path / claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            continue
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


def _first_number(environ: Mapping[str, str], variables: Sequence[str]) -> int | None:
    for variable in variables:
        value = environ.get(variable, "")
        if value.isdigit():
            return int(value)
    return None
