"""Whether a run that is already in a folder is this very job, started on another node.

On shared storage every node's `ddpcheck run --out DIR` points to one folder: the first makes the run, the
others join.
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

# Nodes of one job start within this time of each other, or find the others' records still growing.
_RECENT_SECONDS = 600.0
_NODE_COUNT_OPTIONS = {"--nnodes", "--num_machines", "--num-machines", "--num_nodes", "--num-nodes"}
_NODE_COUNT_VARIABLES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "NNODES", "PET_NNODES", "GROUP_WORLD_SIZE")


def may_join(folder: Path, run: Mapping[str, Any], name: str, job: str, command: Sequence[str]) -> bool:
    """Whether the run in `folder` is still going, and this is the same job on another node.

    A job that has a name is told by it; one that has none must at least speak of several nodes.
    """
    if "ended" in run or run.get("name") != name or run.get("job", "") != job:
        return False
    if not job and not (spans_nodes(command, os.environ) or _is_one_of_many(os.environ)):
        return False
    if run.get("host") == os.uname().nodename:
        # Several "nodes" on one host, as in a rehearsal: the launcher that made the run must still be there.
        pid = run.get("pid")
        return isinstance(pid, int) and process_start(pid) == run.get("pid_start")
    return _was_touched_recently(folder)


def spans_nodes(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether the command line or the scheduler speaks of more than one node."""
    counts = [environ.get(name, "") for name in _NODE_COUNT_VARIABLES]
    for option, value in pairwise([*command, ""]):
        name, _, attached = option.partition("=")
        if name in _NODE_COUNT_OPTIONS:
            counts.append(attached or value)
    # "4", and "1:4" of an elastic job.
    return any(int(number) > 1 for count in counts for number in re.findall(r"\d+", count))


def _is_one_of_many(environ: Mapping[str, str]) -> bool:
    """Whether this very command is to be one rank of several, as where each is started by hand."""
    size = environ.get("WORLD_SIZE", "")
    return size.isdecimal() and int(size) > 1


def _was_touched_recently(folder: Path) -> bool:
    try:
        newest = max(path.stat().st_mtime for path in folder.iterdir())
    except (OSError, ValueError):
        return False
    return time.time() - newest < _RECENT_SECONDS
