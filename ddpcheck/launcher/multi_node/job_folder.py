"""One run folder for all ranks of a job that was not started by `ddpcheck run`.

Nobody hands the ranks a folder, so each works out the same one from what they have in common.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddpcheck.launcher.multi_node.shared_run import spans_nodes
from ddpcheck.launcher.process.process_table import process_start
from ddpcheck.launcher.run_folder import RUNS_FOLDER, RunFolder, run_name

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
_MOST_RUNS = 1000


def meeting_place(base: Path, command: Sequence[str], environ: Mapping[str, str] = os.environ) -> RunFolder:
    """The job's folder under `base`/ddpcheck-runs, made if this rank is the first."""
    name = run_name(command[1:] or command)
    parent = base / RUNS_FOLDER
    parent.mkdir(parents=True, exist_ok=True)
    key = "\n".join(environ.get(variable, "") for variable in _JOB_VARIABLES)
    if spans_nodes((), environ):
        return _claim(parent, f"job-{_short(key)}-{name}", name, environ)
    pid = os.getppid() if rank(environ) is not None else os.getpid()
    started = process_start(pid) or 0
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(_unix_time(started)))
    path = parent / f"{stamp}-{name}-{_short(f'{key} {pid} {started}')}"
    _make(path)
    return RunFolder(path, path.name, name)


def rank(environ: Mapping[str, str]) -> int | None:
    """This process's rank, as far as its launcher has said; None in a process that starts ranks itself."""
    return _first_number(environ, _RANK_VARIABLES)


def local_rank(environ: Mapping[str, str]) -> int:
    return _first_number(environ, _LOCAL_RANK_VARIABLES) or 0


def _claim(parent: Path, stem: str, name: str, environ: Mapping[str, str]) -> RunFolder:
    """Across nodes no process is common to all ranks, so a second run of the same job looks like the first.

    Each rank therefore claims its place in a folder, and goes on to the next one where it finds it taken.
    """
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    claim = f".claim-{rank(environ) or 0}-{attempt}"
    for number in range(1, _MOST_RUNS):
        path = parent / (stem if number == 1 else f"{stem}-{number}")
        following = parent / f"{stem}-{number + 1}"
        if attempt != "0" and following.exists():
            continue  # a restart belongs to the latest run
        _make(path)
        try:
            os.close(os.open(path / claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
        except FileExistsError:
            continue
        return RunFolder(path, path.name, name)
    raise OSError(f"{parent} holds too many runs of {stem}")


def _make(path: Path) -> None:
    path.mkdir(mode=0o700, exist_ok=True)
    path.chmod(0o700)


def _short(key: str) -> str:
    return hashlib.blake2s(key.encode(errors="surrogateescape"), digest_size=4).hexdigest()


def _unix_time(ticks: int) -> float:
    """Ticks since boot as seconds since 1970, the same to the second in all processes of a node."""
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
