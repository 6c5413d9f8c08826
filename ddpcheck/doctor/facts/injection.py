"""Tests whether ddpcheck is injected into a Python: a child process started for that, or this rank."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpcheck.config import ENV_CONFIG
from ddpcheck.doctor.facts.injected import injection_state

# Set for processes that ddpcheck is to be injected into: the folder that is first on their PYTHONPATH.
ENV_TRIAL = "DDPCHECK_DOCTOR_TRIAL"
_TIMEOUT_SECONDS = 120.0


def run_in_child(python: str, script: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run `script`, a file in this folder, in another Python and decode its JSON; on failure, an `error`."""
    try:
        done = subprocess.run(
            # Through standard input: a file argument would put this folder on the import path.
            [python, "-"],
            env=None if environ is None else dict(environ),
            input=Path(__file__).with_name(script).read_text(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_SECONDS,
            check=False,
        )
    except OSError as error:
        return {"error": f"{python} could not be started: {error.strerror or error}"}
    except subprocess.TimeoutExpired:
        return {"error": f"{python} did not answer within {_TIMEOUT_SECONDS:g} s"}
    if done.returncode:
        return {"error": _exit_reason(done.returncode, done.stderr)}
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {"error": "its output is not JSON"}


def _exit_reason(status: int, stderr: str) -> str:
    last = (stderr.strip().splitlines() or [""])[-1]
    if status > 0:
        return last or f"status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"it was killed by {name}"


def injection_in_child(python: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """State in a child process. `environ` is that of a job under `ddpcheck run`, plus `ENV_TRIAL`."""
    return {"into": "a child", **run_in_child(python, "injected.py", environ)}


def injection_in_this_rank() -> dict[str, Any]:
    """State in this process, or {} if injection was not requested. Call before torch is imported."""
    folder = os.environ.get(ENV_TRIAL, "")
    return {"into": "the rank", **injection_state(folder)} if folder else {}


def disable_recording() -> None:
    """Remove ddpcheck's import hook: the doctor's own ranks are not recorded."""
    os.environ.pop(ENV_CONFIG, None)
    sys.meta_path[:] = [each for each in sys.meta_path if type(each).__name__ != "DdpImportFinder"]
