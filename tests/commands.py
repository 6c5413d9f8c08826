"""Runs commands as a user would, in an environment that holds nothing of the tests or of a launcher around them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent
# For a job to take everything down with it, once asked to.
END_SECONDS = 40.0

# What a launcher, a scheduler or a test runner may have set, and would be taken for the job's own.
_OF_OTHERS = (
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
class Done:
    """A command that has ended."""

    status: int
    stdout: str
    stderr: str

    def __str__(self) -> str:
        return f"status {self.status}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


class TookTooLong(Exception):
    """A command that had to be ended; what it left until then is there."""

    def __init__(self, done: Done) -> None:
        super().__init__(str(done))
        self.done = done


def environment(**more: str) -> dict[str, str]:
    """This process's own without what belongs to others; one thread a process, no network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_OTHERS)}
    path = f"{BIN}{os.pathsep}{kept.get('PATH', os.defpath)}"
    return {**kept, "PATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200", **more}


def run_to_end(
    command: Sequence[object], folder: str | Path, env: Mapping[str, str], most_seconds: float
) -> Done:
    process = subprocess.Popen(
        [str(word) for word in command],
        cwd=folder,
        env=environment(**env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        stdout, stderr = process.communicate(timeout=most_seconds)
    except subprocess.TimeoutExpired:
        stdout, stderr = _end(process)
        raise TookTooLong(Done(process.returncode, stdout, stderr)) from None
    return Done(process.returncode, stdout, stderr)


def _end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Launchers take their ranks down with them when asked to, but not when killed."""
    process.terminate()
    try:
        return process.communicate(timeout=END_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()
