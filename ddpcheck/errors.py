"""Errors meant for people: each carries an exit status and is printed in one place, without a traceback."""

from __future__ import annotations


class UserError(Exception):
    """What the user asked for cannot be done; the message says what happened, why, and what to do next."""

    exit_status = 1


class UsageError(UserError):
    """The command line itself is wrong."""

    exit_status = 2


class RunNotFound(UserError):
    """There is no run where the user pointed."""


class RunUnreadable(UserError):
    """There is a run, but nothing in it can be read."""


class NotComparable(UserError):
    """Two runs that have too little in common to say where they part."""

    exit_status = 2


class NotOneJob(UserError):
    """Run folders that were to be joined are of different jobs."""

    exit_status = 2


class OutputFolderError(UserError):
    """The run folder cannot be made or written."""


class CommandNotStarted(UserError):
    """The user's command could not be started; the status is the shell's for the same mistake."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class LauncherFailed(UserError):
    """A launcher that was to start ranks of ddpcheck's own ended without them; the status is its own."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


class PackageMissing(UserError):
    """Something that ddpcheck does not bring along itself is not installed."""


class PortInUse(UserError):
    """Somebody else listens there."""


class ViewerFailed(UserError):
    """TensorBoard was started and did not come up."""


class TraceUnreadable(UserError):
    """A file is no trace, or not a whole one."""


class TraceWithoutCommunication(UserError):
    """A trace can be read, but no collective shows in it."""


class TraceIsTimeline(UserError):
    """A file is not a rank's trace but a timeline that ddpcheck made of several."""
