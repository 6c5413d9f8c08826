"""The name of a session: one start of a job, with a mark that all starts of an elastic job share.

Standard library only: this is imported inside ranks.
"""

from __future__ import annotations

_JOB_DIGITS = 16


def session_name(start: str, job: str) -> str:
    """From two names of 32 digits: what is special comes first, since files are named by the beginning."""
    return start[:-_JOB_DIGITS] + job[-_JOB_DIGITS:]


def of_one_job(session: str, other: str) -> bool:
    return session[-_JOB_DIGITS:] == other[-_JOB_DIGITS:]
