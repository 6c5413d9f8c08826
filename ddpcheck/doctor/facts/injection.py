"""Whether ddpcheck gets into a Python: into a child that is started for it, or into this rank."""

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
from ddpcheck.doctor.facts.injected import look

_SECONDS = 120.0


def ask_child(python: str, script: str, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """`script` is the name of a file beside this one; an `error` says why there is no answer."""
    try:
        done = subprocess.run(
            # By standard input: as a file it would put this folder on the path of what it imports.
            [python, "-"],
            env=None if environ is None else dict(environ),
            input=Path(__file__).with_name(script).read_text(),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_SECONDS,
            check=False,
        )
    except OSError as error:
        return {"error": f"{python} cannot be started: {error.strerror or error}"}
    except subprocess.TimeoutExpired:
        return {"error": f"{python} gave no answer within {_SECONDS:g} s"}
    if done.returncode:
        return {"error": _how_it_ended(done.returncode, done.stderr)}
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {"error": "the answer cannot be read"}


def _how_it_ended(status: int, stderr: str) -> str:
    last = (stderr.strip().splitlines() or [""])[-1]
    if status > 0:
        return last or f"status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"it was ended by {name}"


# In the environment of those that are to be got into: the folder that stands first on their PYTHONPATH.
ENV_TRIAL = "DDPCHECK_DOCTOR_TRIAL"


def in_a_child(python: str, environ: Mapping[str, str]) -> dict[str, Any]:
    """`environ` is that of a job under `ddpcheck run`, with `ENV_TRIAL`."""
    return {"into": "a child", **ask_child(python, "injected.py", environ)}


def in_this_rank() -> dict[str, Any]:
    """Before torch is imported. Nothing, where ddpcheck did not try to get in."""
    folder = os.environ.get(ENV_TRIAL, "")
    return {"into": "the rank", **look(folder)} if folder else {}


def stand_aside() -> None:
    """The doctor's own ranks are not to be watched."""
    os.environ.pop(ENV_CONFIG, None)
    sys.meta_path[:] = [each for each in sys.meta_path if type(each).__name__ != "DdpImportFinder"]
