"""The way in for workers that another program starts: what a launcher has to set, and the run folder for them.

`ddpcheck run` passes its settings to all processes that it starts. Workers of a Ray cluster, of Spark, Dask, a
Kubernetes operator or a notebook server are started by a process that existed before. They take part if that process
sets the same two variables.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from ddpcheck.config import Config
from ddpcheck.launcher.job_identity import find_job_id
from ddpcheck.launcher.process.command import BOOTSTRAP
from ddpcheck.launcher.run_folder import begin_run, can_still_grow, make_run_folder
from ddpcheck.records.reader import read_run_file

PYTHON_PATH = "PYTHONPATH"


def prepare_run(settings: Config, *, create: bool = True) -> Config:
    """The settings for the workers. Creates the run folder, or joins one that was prepared for the same job.

    `create=False`: the folder exists only where the workers run, and they create it.
    """
    settings = replace(settings, own_launcher=False)
    if not create:
        path = settings.out or Path()
        return replace(settings, run_dir=str(path), run_id=settings.job_id or path.name)
    if settings.out is not None:
        path = settings.out.absolute()
        run = read_run_file(path)
        if can_still_grow(path, run) and run.get("job", "") == find_job_id(settings.job_id, [], os.environ):
            return replace(settings, run_dir=str(path), run_id=str(run.get("id", path.name)))
    folder = make_run_folder([], out=settings.out, name=settings.name or "", job_id=settings.job_id)
    config = replace(settings, run_dir=str(folder.path), run_id=folder.run_id)
    begin_run(folder, [], config)
    return config


def worker_variables(config: Config, package: Path | None = None) -> dict[str, str]:
    """The variables that a launcher has to set. `package`: where ddpcheck is installed for the workers."""
    bootstrap = BOOTSTRAP if package is None else str(package / "bootstrap")
    return {PYTHON_PATH: bootstrap, **config.to_environment()}


def as_bash(variables: Mapping[str, str]) -> str:
    """For `eval`. Entries that PYTHONPATH has already are kept."""
    lines = []
    for name, value in variables.items():
        kept = '"${PYTHONPATH:+:$PYTHONPATH}"' if name == PYTHON_PATH else ""
        lines.append(f"export {name}={shlex.quote(value)}{kept}\n")
    return "".join(lines)


def as_json(variables: Mapping[str, str]) -> str:
    return json.dumps(dict(variables), indent=1) + "\n"


def as_kubernetes(variables: Mapping[str, str]) -> str:
    """The `env:` of a container. A string in JSON is one in YAML."""
    lines = ["env:\n"]
    for name, value in variables.items():
        # Kubernetes replaces $(NAME) in values; two dollar signs mean one.
        escaped = value.replace("$(", "$$(")
        lines.append(f"  - name: {name}\n    value: {json.dumps(escaped)}\n")
    return "".join(lines)


def as_python(variables: Mapping[str, str]) -> str:
    rows = "".join(f"    {name!r}: {value!r},\n" for name, value in variables.items())
    return "{\n" + rows + "}\n"


FORMATS: dict[str, Callable[[Mapping[str, str]], str]] = {
    "bash": as_bash,
    "json": as_json,
    "k8s": as_kubernetes,
    "python": as_python,
}


def has_own_entries(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether PYTHONPATH of this process has entries that the printed value replaces for the workers."""
    return any(entry != BOOTSTRAP for entry in environ.get(PYTHON_PATH, "").split(os.pathsep) if entry)
