"""The few lines under a job's own output: how far it is, whether replicas agree, what a step costs."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from ddpcheck.analysis.live.state import LiveState
from ddpcheck.reports.live_text import (
    agreement_text,
    clock_text,
    finding_text,
    memory_text,
    pace_texts,
    ranks_text,
)
from ddpcheck.reports.spark import SPARK, spark
from ddpcheck.reports.terminal.console import LABEL, QUIET, Ink

HEIGHT = 4
_MOST_BARS = 24
_FEWEST_BARS = 6


def panel_lines(state: LiveState, console: Console, columns: int) -> list[str]:
    """`HEIGHT` lines of at most `columns` - 1 characters, with their colours."""
    ink = Ink(console)
    rows = [
        _title(ink, state, columns - 1),
        _course(ink, state),
        _pace(ink, state, columns),
        _found(ink, state),
    ]
    return [_drawn(console, row, columns - 1) for row in rows]


def _drawn(console: Console, row: Text, width: int) -> str:
    row.truncate(width, overflow="crop")
    with console.capture() as captured:
        console.print(row, end="", no_wrap=True, overflow="ignore", crop=False, width=width, highlight=False)
    return captured.get()


def _title(ink: Ink, state: LiveState, width: int) -> Text:
    line = "-" if ink.console.options.ascii_only else "─"
    told = ink.text(f"{line * 2} ")
    told.append("ddpcheck", LABEL)
    told.append(ink.text(f" {state.name}, {ranks_text(state)}, {clock_text(state.seconds)} "))
    return told.append(line * max(0, width - len(told)), QUIET)


def _course(ink: Ink, state: LiveState) -> Text:
    said, style = agreement_text(state)
    others = f" (others from {state.fewest_steps:,})" if state.fewest_steps != state.steps else ""
    return Text.assemble(
        ink.text(f"step {state.steps:,}", LABEL), ink.text(f"{others}   "), ink.text(said, style)
    )


def _pace(ink: Ink, state: LiveState, columns: int) -> Text:
    if state.pace is None:
        return ink.text("no step has been clocked so far", QUIET)
    step, *shares = pace_texts(state.pace)
    figures = "".join(f"   {part}" for part in (*shares, memory_text(state)) if part)
    # Figures come first where there is little room.
    width = min(_MOST_BARS, columns - 1 - len(step) - 1 - len(figures))
    latest = state.pace.course_us[-width:] if width >= _FEWEST_BARS else ()
    bars = spark(latest, width, ink.console.options.ascii_only)
    return Text.assemble(ink.text(f"{step} " if bars else step), ink.text(bars, SPARK), ink.text(figures))


def _found(ink: Ink, state: LiveState) -> Text:
    said, style = finding_text(state)
    return ink.text(said, style)
