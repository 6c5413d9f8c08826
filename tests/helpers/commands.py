"""Runs commands as a user would, without the variables of a launcher or test runner around them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.fork_server import prefix

BIN = Path(sys.executable).parent
# How long a job may take to stop its processes after SIGTERM.
END_SECONDS = 40.0

# Variables that a launcher, a scheduler or a test runner may have set. The job must not take them for its own.
_INHERITED_PREFIXES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "MASTER_",
    "GROUP_",
    "ROLE_",
    "TORCH",
    "SLURM_",
    "OMPI_",
    "DDPCHECK_",
    "PYTHON",
    "ACCELERATE_",
    "PL_",
    "PYTEST_",
    "COV_",
)


@dataclass(frozen=True)
class CommandResult:
    """Exit status and output of a finished command."""

    status: int
    stdout: str
    stderr: str

    def __str__(self) -> str:
        return f"status {self.status}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


class CommandTimeout(Exception):
    """The command was stopped at its time limit; `result` holds its output until then."""

    def __init__(self, result: CommandResult) -> None:
        super().__init__(str(result))
        self.result = result


def environment(**more: str) -> dict[str, str]:
    """This process's environment without inherited job variables; one thread per process, no network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_INHERITED_PREFIXES)}
    path = f"{BIN}{os.pathsep}{kept.get('PATH', os.defpath)}"
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200", **more}


def run_command(
    command: Sequence[object], folder: str | Path, env: Mapping[str, str], timeout: float
) -> CommandResult:
    """Run a command in `folder` until it ends; raise CommandTimeout after `timeout` seconds."""
    process = subprocess.Popen(
        [str(word) for word in (*prefix(command), *command)],
        cwd=folder,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        stdout, stderr = _stop(process)
        raise CommandTimeout(CommandResult(process.returncode, stdout, stderr)) from None
    return CommandResult(process.returncode, stdout, stderr)


def _stop(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Send SIGTERM first: a launcher that is killed leaves its ranks running."""
    process.terminate()
    try:
        return process.communicate(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()
