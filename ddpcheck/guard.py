"""The guard between the user's program and ddpcheck: a probe that fails is switched off and reported."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from ddpcheck.privacy import mask_text

T = TypeVar("T")

Reporter = Callable[[str, str, str, str], None]


def _ignore(name: str) -> None:
    """Without a rank there is no file to report it in."""


class EntryPoint:
    """One entry point from the user's program into ddpcheck. Tests replace `body` to make it fail."""

    def __init__(self, probe: str, name: str, body: Callable[..., Any]) -> None:
        self.probe = probe
        self.name = name
        self.body = body


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
        # Whether a graph is being captured, where any call that touches the device would break it; the agent sets it.
        self.capturing: Callable[[], bool] = bool
        # Called with the name of an entry that did nothing because of that.
        self.skipped: Callable[[str], None] = _ignore

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
        self, probe: str, name: str, body: Callable[..., T], while_capturing: bool = False
    ) -> Callable[..., T | None]:
        """`body` for calls from the user's program: raises no Exception, and does nothing once switched off.

        While a graph is captured it does nothing either, unless it touches no device (`while_capturing`).
        KeyboardInterrupt and SystemExit are not caught: they belong to the user's program.
        """
        entry = self.register(probe, name, body)

        @functools.wraps(body)
        def protected(*args: Any, **kwargs: Any) -> T | None:
            if probe in self.off:
                return None
            try:
                if not while_capturing and self.capturing():
                    self.skipped(name)
                    return None
                with self.surroundings():
                    result: T = entry.body(*args, **kwargs)
            except Exception as error:
                self.switch_off(entry, error)
                return None
            return result

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
