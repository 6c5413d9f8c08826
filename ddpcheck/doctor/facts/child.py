"""Asks another Python: runs one of the scripts of this folder in it and takes its JSON."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

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
