"""Errors for users. Each has an exit status and is printed without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """A request cannot be fulfilled. The message says what happened, why, and what to do."""

    exit_status = 1


class UsageError(UserError):
    """The command line is invalid."""

    exit_status = 2


class RunNotFound(UserError):
    """There is no run at the given path."""


class RunUnreadable(UserError):
    """There is a run, but nothing in it can be read."""


class RecordsFolded(UserError):
    """Steps of a run that is still recorded were folded while they were read."""


class NotComparable(UserError):
    """Two runs have too little in common to compare them."""

    exit_status = 2


class NotOneJob(UserError):
    """Run folders of different jobs cannot be merged."""

    exit_status = 2


class OutputFolderError(UserError):
    """The run folder cannot be created or written."""


class CommandNotStarted(UserError):
    """The user's command could not be started. The exit status is the one a shell returns."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class LauncherFailed(UserError):
    """A launcher ended without starting the ranks of ddpcheck. The exit status is that of the launcher."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class PackageMissing(UserError):
    """An optional package is not installed."""


class PortInUse(UserError):
    """Another process listens on the port."""


class ViewerFailed(UserError):
    """TensorBoard was started but does not respond."""


class TraceUnreadable(UserError):
    """A file is not a trace, or is incomplete."""


class TraceWithoutCommunication(UserError):
    """A trace contains no collectives."""


class TraceIsTimeline(UserError):
    """A file is a timeline that ddpcheck merged from several traces, not the trace of a rank."""
