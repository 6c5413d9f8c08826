"""Lines of one run, step by step."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ddpcheck.analysis.timeseries.model import Line
from ddpcheck.reports.tensorboard.event_file import EventFile
from ddpcheck.reports.tensorboard.tags import SHOWN, tag_of


def write_lines(file: EventFile, lines: Iterable[Line], when: Callable[[float], float]) -> None:
    """All figures of a step go into one record, with the time at which the step was over."""
    by_step: dict[int, dict[str, float]] = {}
    about: dict[str, str] = {}
    for line in lines:
        shown, tag = SHOWN[line.figure], tag_of(line)
        about[tag] = shown.about
        for step, value in zip(line.steps, line.values, strict=True):
            by_step.setdefault(step, {})[tag] = value / shown.unit
    for step in sorted(by_step):
        file.scalars(step, when(step), by_step[step], about)
