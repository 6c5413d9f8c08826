"""The guard between the user's program and ddpcheck: a probe that fails is switched off and reported."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol, TypeVar

from ddpcheck.privacy import mask_text

T = TypeVar("T")

Reporter = Callable[[str, str, str, str], None]


def _ignore(name: str) -> None:
    """Without a rank there is no file to report it in."""


class OwnClock(Protocol):
    """Sums the time that ddpcheck takes on the training thread."""

    own_ns: int
    # When the current entry from the program began; 0: the program itself runs.
    entered: int


class EntryPoint:
    """One entry point from the user's program into ddpcheck. Tests replace `body` to make it fail."""

    __slots__ = ("always_timed", "body", "name", "ns", "probe")

    def __init__(self, probe: str, name: str, body: Callable[..., Any]) -> None:
        self.probe = probe
        self.name = name
        self.body = body
        # Nanoseconds spent in it, where its caller counts them; an estimate unless it is timed at each call.
        self.ns = 0
        self.always_timed = False


class Hiding(NamedTuple):
    """Keeps torch.compile from tracing a function."""

    # Not None while a compiler watches the calls of this thread: asking takes a tenth of what hiding takes.
    compiling: Callable[[], object]
    # Returns a function that calls the given one with the compiler switched off.
    hide: Callable[[Callable[..., Any]], Callable[..., Any]]


class Guard:
    """Runs entry points; the first exception in one switches off all entry points of that probe."""

    def __init__(self) -> None:
        self.entry_points: dict[str, EntryPoint] = {}
        self.off: set[str] = set()
        self._reporters: list[Reporter] = []
        # Called for faults while there is no reporter, for example if creating the rank context failed.
        self.last_resort: Reporter | None = None
        # Probes that start before the process is a rank: their faults are kept until then, and dropped if it never is.
        self.early: set[str] = set()
        self._unreported: list[tuple[str, str, str, str]] = []
        # Context manager in which every entry point runs; the agent sets it.
        self.surroundings: Callable[[], AbstractContextManager[Any]] = nullcontext
        # Counts the time of entry points on the training thread; the agent sets it.
        self.clock: OwnClock | None = None
        # One check per device type of the job: whether a graph is being captured, where any call that touches
        # the device would break it. The agent sets the list.
        self.capture_checks: Sequence[Callable[[], bool]] = ()
        # Called with the name of an entry that did nothing because of that.
        self.skipped: Callable[[str], None] = _ignore

    def capturing(self) -> bool:
        return any(check() for check in self.capture_checks)

    def report_to(self, reporter: Reporter) -> None:
        self._reporters[:] = [reporter]
        for fault in self._unreported:
            reporter(*fault)
        self._unreported.clear()

    def register(self, probe: str, name: str, body: Callable[..., Any]) -> EntryPoint:
        """An entry point whose caller catches its exceptions and reports them to `switch_off`."""
        entry = EntryPoint(probe, name, body)
        self.entry_points[f"{probe}.{name}"] = entry
        return entry

    def protect(
        self,
        probe: str,
        name: str,
        body: Callable[..., T],
        while_capturing: bool = False,
        timed: bool = False,
        hiding: Hiding | None = None,
    ) -> Callable[..., T | None]:
        """`body` for calls from the user's program: raises no Exception, and does nothing once switched off.

        While a graph is captured it does nothing either, unless it touches no device (`while_capturing`).
        KeyboardInterrupt and SystemExit are not caught: they belong to the user's program.
        `timed`: the training thread calls it during training, so its time counts as ddpcheck's own.
        `hiding`: keeps a compiler from tracing it.
        """
        entry = self.register(probe, name, body)
        off = self.off
        compiling = None if hiding is None else hiding.compiling

        @functools.wraps(body)
        def protected(*args: Any, **kwargs: Any) -> T | None:
            if probe in off:
                return None
            if compiling is not None and compiling() is not None:
                return hidden(*args, **kwargs)
            # Inside another entry, that one counts. If threads enter at the same time, only the first is counted.
            clock = self.clock if timed else None
            if clock is not None:
                if clock.entered:
                    clock = None
                else:
                    clock.entered = perf_counter_ns()
            try:
                if self.capture_checks and not while_capturing and self.capturing():
                    self.skipped(name)
                    return None
                with self.surroundings():
                    result: T = entry.body(*args, **kwargs)
                    return result
            except Exception as error:
                self.switch_off(entry, error)
                return None
            finally:
                if clock is not None:
                    spent = perf_counter_ns() - clock.entered
                    clock.own_ns += spent
                    entry.ns += spent
                    clock.entered = 0

        # Called with the compiler switched off, it goes the other way.
        hidden = protected if hiding is None else hiding.hide(protected)
        return protected

    def switch_off(self, entry: EntryPoint, error: Exception) -> None:
        """Switch off all entry points of the probe, and report why."""
        self.off.add(entry.probe)
        frames = traceback.extract_tb(error.__traceback__)
        where = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
        text = mask_text(f"{type(error).__name__}: {error}"[:4000])[:500]
        fault = (entry.probe, entry.name, text, where)
        last_resort = None if entry.probe in self.early else self.last_resort
        reporter = self._reporters[0] if self._reporters else last_resort
        if reporter is None:
            self._unreported.append(fault)
            return
        try:
            reporter(*fault)
        except Exception:
            self._unreported.append(fault)


GUARD = Guard()
