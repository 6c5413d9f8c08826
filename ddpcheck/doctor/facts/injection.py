"""Whether ddpcheck gets into a Python: into a child that is started for it, or into this rank."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from ddpcheck.config import ENV_CONFIG
from ddpcheck.doctor.facts.child import ask_child
from ddpcheck.doctor.facts.injected import look

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
