"""The environment of the user's command: theirs, plus the two variables through which ddpcheck gets in."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import ddpcheck
from ddpcheck.config import Config

# Not resolved: a rank removes the folder from sys.path by the very name it was given.
BOOTSTRAP = os.path.join(os.path.dirname(os.path.abspath(ddpcheck.__file__)), "bootstrap")


def command_environment(config: Config, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """`environ` (default: this process's), with the bootstrap first on PYTHONPATH and the configuration."""
    result = dict(os.environ if environ is None else environ)
    result["PYTHONPATH"] = prefixed_python_path(result.get("PYTHONPATH", ""))
    result.update(config.to_environment())
    return result


def prefixed_python_path(python_path: str, folder: str | Path = BOOTSTRAP) -> str:
    """`python_path` with `folder` first, and nowhere else (a run inside a run).

    An empty value means "nothing", but an empty entry means "the current folder": one is dropped, the other
    kept.
    """
    if not python_path:
        return str(folder)
    entries = [entry for entry in python_path.split(os.pathsep) if entry != str(folder)]
    return os.pathsep.join([str(folder), *entries])
