"""The identity of a job on a node, from its command line and its environment: id, nodes, tasks and ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

_NODE_COUNT_OPTIONS = {"--nnodes", "--num_machines", "--num-machines", "--num_nodes", "--num-nodes"}
_NODE_COUNT_VARIABLES = ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "NNODES", "PET_NNODES", "GROUP_WORLD_SIZE")
_RENDEZVOUS_OPTIONS = {"--rdzv-id", "--rdzv_id"}
_RENDEZVOUS_VARIABLE = "PET_RDZV_ID"
# For each scheduler, the variables that identify a job and, within a job, a step and a restart. A mpirun inside a Slurm
# job comes first: it starts its daemons by a step of their own, except on the first node.
_SCHEDULER_VARIABLES = (
    ("OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID", "SLURM_RESTART_COUNT"),
    ("PMIX_NAMESPACE", "SLURM_RESTART_COUNT"),
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ("PBS_JOBID",),
    ("LSB_JOBID",),
    ("FLUX_JOB_ID",),
)
# The ids that torchrun uses if none was given.
_DEFAULT_RENDEZVOUS_IDS = {"", "none"}
# By launcher: the number of its tasks and the number of this one. The script of a Slurm job has the second one too.
_TASK_VARIABLES = (
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
)
# Those of Slurm last: a mpirun inside a Slurm job passes on the ones of its script.
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_LOCAL_RANK_VARIABLES = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID", *_RANK_VARIABLES)
_LAUNCH_VARIABLES = (
    "TORCHELASTIC_RUN_ID",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMPI_MCA_ess_base_jobid",
    "PMIX_NAMESPACE",
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_RESTART_COUNT",
)


def spans_nodes(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether the command line or the scheduler requests more than one node."""
    counts = [environ.get(name, "") for name in _NODE_COUNT_VARIABLES]
    for option, value in pairwise([*command, ""]):
        name, _, attached = option.partition("=")
        if name in _NODE_COUNT_OPTIONS:
            counts.append(attached or value)
    # "4", or "1:4" for an elastic job.
    return any(int(number) > 1 for count in counts for number in re.findall(r"\d+", count))


def is_single_rank_of_job(environ: Mapping[str, str]) -> bool:
    """Whether this command is one rank of several, each started separately."""
    return (_first_number(environ, ("WORLD_SIZE",)) or 0) > 1 or task_of_job(environ) is not None


def task_of_job(environ: Mapping[str, str]) -> int | None:
    """The number of this task if srun or mpirun has started several; None in the script of a job."""
    for size, number in _TASK_VARIABLES:
        if (_first_number(environ, (size,)) or 0) > 1:
            return _first_number(environ, (number,))
    return None


def find_job_id(given: str, command: Sequence[str], environ: Mapping[str, str]) -> str:
    """An id that is the same on all nodes of a job; empty if there is none."""
    return given or _rendezvous_id(command, environ) or _scheduler_id(environ)


def _rendezvous_id(command: Sequence[str], environ: Mapping[str, str]) -> str:
    for option, value in pairwise([*command, ""]):
        name, _, attached = option.partition("=")
        if name in _RENDEZVOUS_OPTIONS and (attached or value) not in _DEFAULT_RENDEZVOUS_IDS:
            return attached or value
    named = environ.get(_RENDEZVOUS_VARIABLE, "")
    return "" if named in _DEFAULT_RENDEZVOUS_IDS else named


def _scheduler_id(environ: Mapping[str, str]) -> str:
    for job, *details in _SCHEDULER_VARIABLES:
        if environ.get(job):
            return ".".join([environ[job], *(environ[name] for name in details if environ.get(name))])
    return ""


def launch_key(environ: Mapping[str, str]) -> str:
    """What the ranks of one launch have in common."""
    return "\n".join(environ.get(variable, "") for variable in _LAUNCH_VARIABLES)


def rank(environ: Mapping[str, str]) -> int | None:
    """The rank that the launcher assigned to this process; None in a process that starts ranks itself."""
    return _first_number(environ, _RANK_VARIABLES)


def local_rank(environ: Mapping[str, str]) -> int:
    return _first_number(environ, _LOCAL_RANK_VARIABLES) or 0


def _first_number(environ: Mapping[str, str], variables: Sequence[str]) -> int | None:
    for variable in variables:
        value = environ.get(variable, "")
        if value.isdigit():
            return int(value)
    return None
