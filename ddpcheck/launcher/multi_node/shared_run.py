"""Decides whether the run in a folder is the same job, started on another node.

On shared storage, `ddpcheck run --out DIR` on all nodes uses one folder: the first node creates the run, the
others join it.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ddpcheck.launcher.process.process_table import process_start

# The nodes of one job start within this time, or the records of the others have grown within it.
_RECENT_SECONDS = 600.0
_NODE_COUNT_OPTIONS = {"--nnodes", "--num_machines", "--num-machines", "--num_nodes", "--num-nodes"}
_NODE_COUNT_VARIABLES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "NNODES", "PET_NNODES", "GROUP_WORLD_SIZE")


def may_join(folder: Path, run: Mapping[str, Any], name: str, job: str, command: Sequence[str]) -> bool:
    """Whether the run in `folder` has not ended and is the same job on another node.

    Jobs with an id are compared by it. Without an id, the command or the scheduler must request several nodes.
    """
    if "ended" in run or run.get("name") != name or run.get("job", "") != job:
        return False
    if not job and not (spans_nodes(command, os.environ) or _is_single_rank_of_job(os.environ)):
        return False
    if run.get("host") == os.uname().nodename:
        # Several launchers on one host, as in a test setup: the launcher that created the run must still exist.
        pid = run.get("pid")
        return isinstance(pid, int) and process_start(pid) == run.get("pid_start")
    return _was_modified_recently(folder)


def spans_nodes(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether the command line or the scheduler requests more than one node."""
    counts = [environ.get(name, "") for name in _NODE_COUNT_VARIABLES]
    for option, value in pairwise([*command, ""]):
        name, _, attached = option.partition("=")
        if name in _NODE_COUNT_OPTIONS:
            counts.append(attached or value)
    # "4", or "1:4" for an elastic job.
    return any(int(number) > 1 for count in counts for number in re.findall(r"\d+", count))


def _is_single_rank_of_job(environ: Mapping[str, str]) -> bool:
    """Whether this command is one rank of several, each started separately."""
    size = environ.get("WORLD_SIZE", "")
    return size.isdecimal() and int(size) > 1


def _was_modified_recently(folder: Path) -> bool:
    try:
        newest = max(path.stat().st_mtime for path in folder.iterdir())
    except (OSError, ValueError):
        return False
    return time.time() - newest < _RECENT_SECONDS
