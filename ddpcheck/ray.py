"""Ray: passes ddpcheck's settings to the workers of a Ray cluster.

    ray.init(runtime_env=ddpcheck.ray.runtime_env(out="/shared/runs/job7"))

The driver needs no call under `ddpcheck run`: Ray then calls `runtime_env_hook`. Without it, `ddpcheck collect` reports
on the run folder after the job. The folder has to be one that all nodes of the cluster see.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddpcheck.config import Config
from ddpcheck.launcher.worker_environment import PYTHON_PATH, prepare_run, worker_variables

_VARIABLES = "env_vars"


def runtime_env(
    given: Mapping[str, Any] | None = None, *, out: str | Path | None = None, **settings: Any
) -> dict[str, Any]:
    """The runtime environment `given`, with what ddpcheck needs in the workers.

    Under `ddpcheck run` the workers join that run. Otherwise they write to `out`, by default a new folder in
    `ddpcheck-runs`. `settings` are those of `ddpcheck run`, such as `every=10`.
    """
    config = Config.from_environment(os.environ)
    if config is None or out is not None or settings:
        path = None if out is None else Path(out)
        config = prepare_run(Config.from_options({"out": path, **settings}))
    return _with_variables(dict(given or {}), worker_variables(config))


def runtime_env_hook(given: dict[str, Any] | None) -> dict[str, Any]:
    """For RAY_RUNTIME_ENV_HOOK, which Ray calls in `ray.init`. An error leaves the job unchecked, not stopped."""
    try:
        return runtime_env(given) if Config.from_environment(os.environ) is not None else dict(given or {})
    except Exception:
        return dict(given or {})


def _with_variables(environment: dict[str, Any], variables: dict[str, str]) -> dict[str, Any]:
    own = dict(environment.get(_VARIABLES) or {})
    # Ray replaces ${PYTHONPATH} by the value on the node of the worker.
    kept = own.get(PYTHON_PATH) or "${PYTHONPATH}"
    variables = {**variables, PYTHON_PATH: os.pathsep.join([variables[PYTHON_PATH], kept])}
    return {**environment, _VARIABLES: {**own, **variables}}
