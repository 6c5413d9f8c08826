"""The environment of the user's command: unchanged except for PYTHONPATH and the settings variable."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import ddpcheck
from ddpcheck.config import Config

# Not resolved: a rank removes exactly this entry from sys.path.
BOOTSTRAP = os.path.join(os.path.dirname(os.path.abspath(ddpcheck.__file__)), "bootstrap")


def command_environment(config: Config, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """`environ` (default: of this process), with the bootstrap folder first on PYTHONPATH and the settings."""
    result = dict(os.environ if environ is None else environ)
    result["PYTHONPATH"] = prefixed_python_path(result.get("PYTHONPATH", ""))
    result.update(config.to_environment())
    return result


def prefixed_python_path(python_path: str, folder: str | Path = BOOTSTRAP) -> str:
    """`python_path` with `folder` first and only once, also for a run inside a run.

    An empty value means "no entries" and is dropped. An empty entry means "the current folder" and is kept.
    """
    if not python_path:
        return str(folder)
    entries = [entry for entry in python_path.split(os.pathsep) if entry != str(folder)]
    return os.pathsep.join([str(folder), *entries])
