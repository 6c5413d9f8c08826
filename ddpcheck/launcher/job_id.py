"""The name by which the nodes of one job know each other: given, of the rendezvous, or of the scheduler."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

_RENDEZVOUS_OPTIONS = {"--rdzv-id", "--rdzv_id"}
_RENDEZVOUS_VARIABLE = "PET_RDZV_ID"
# By scheduler, what names a job and, of one that starts several things, which of them.
_SCHEDULERS = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    ("PBS_JOBID",),
    ("LSB_JOBID",),
    ("FLUX_JOB_ID",),
)
# What torchrun calls a rendezvous that nobody named.
_UNNAMED = {"", "none"}


def job_id(given: str, command: Sequence[str], environ: Mapping[str, str]) -> str:
    """The same on all nodes of a job; empty where nothing names it."""
    return given or _of_rendezvous(command, environ) or _of_scheduler(environ)


def _of_rendezvous(command: Sequence[str], environ: Mapping[str, str]) -> str:
    for option, value in pairwise([*command, ""]):
        name, _, attached = option.partition("=")
        if name in _RENDEZVOUS_OPTIONS and (attached or value) not in _UNNAMED:
            return attached or value
    named = environ.get(_RENDEZVOUS_VARIABLE, "")
    return "" if named in _UNNAMED else named


def _of_scheduler(environ: Mapping[str, str]) -> str:
    for first, *others in _SCHEDULERS:
        if environ.get(first):
            return ".".join([environ[first], *(environ[name] for name in others if environ.get(name))])
    return ""
