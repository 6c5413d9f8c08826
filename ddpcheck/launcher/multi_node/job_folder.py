"""One run folder for all ranks of a job that was not started by `ddpcheck run`.

No launcher passes the ranks a folder, so each rank derives the same one from its environment.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddpcheck.launcher.multi_node.shared_run import spans_nodes
from ddpcheck.launcher.process.process_table import process_start
from ddpcheck.launcher.run_folder import RunFolder, run_name
from ddpcheck.records.reader import RUNS_FOLDER

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
