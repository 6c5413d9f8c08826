"""The name of a session, which is one launch of a job. All launches of an elastic job have the same suffix.

Standard library only: this is imported inside ranks.
"""

from __future__ import annotations

_JOB_DIGITS = 16


def session_name(launch: str, job: str) -> str:
    """Combine two names of 32 digits. The part of the launch comes first: file names use the beginning."""
    return launch[:-_JOB_DIGITS] + job[-_JOB_DIGITS:]


def is_same_job(session: str, other: str) -> bool:
    return session[-_JOB_DIGITS:] == other[-_JOB_DIGITS:]
