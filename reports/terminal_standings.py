"""Where ranks that hang stand: their stacks side by side, the innermost call on top."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType

from ddpcheck.formatting import name_ranks
from ddpcheck.reports.terminal.console import Ink, indented

_MOST_COLUMNS = 4
_MOST_LINES = 10
# A stack takes about this much to be read.
_LEAST_WIDTH = 30
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")


def standings(ink: Ink, groups: Sequence[Mapping[str, Any]]) -> RenderableType:
    """One column for ranks that stand alike; as many beside each other as the console has room for."""
    room = max(1, min(_MOST_COLUMNS, ink.console.width // _LEAST_WIDTH))
    blocks: list[RenderableType] = [ink.text("where they stand, the innermost call first:")]
    for at in range(0, min(len(groups), 2 * _MOST_COLUMNS), room):
        shown = groups[at : at + room]
        columns = [_column(group) for group in shown]
        height = max(map(len, columns))
        rows = zip(*(column + [""] * (height - len(column)) for column in columns), strict=True)
        blocks.append(indented(ink.columns([name_ranks(group["ranks"]) for group in shown], rows)))
    left_out = len(groups) - 2 * _MOST_COLUMNS
    if left_out > 0:
        blocks.append(indented(ink.text(f"and {left_out} more places, in report.json")))
    return Group(*blocks)


def _column(group: Mapping[str, Any]) -> list[str]:
    if group["left"]:
        state = "has left"
    elif group["waits_in"]:
        state = f"waits in {group['waits_in']}"
    else:
        state = "stands still"
    return [f"step {group['step']}", state, *_lines(group["stack"])]


def _lines(stack: Sequence[str]) -> list[str]:
    """The innermost call and the user's own; what lies in libraries between them is counted."""
    if not stack:
        return ["its stack could not be read"]
    lines = [_short(stack[0])]
    hidden = 0
    for call in stack[1:]:
        if any(mark in call for mark in _LIBRARIES):
            hidden += 1
            continue
        lines += [f"({hidden} in libraries)"] if hidden else []
        lines.append(_short(call))
        hidden = 0
    left_out = len(lines) - _MOST_LINES
    return [*lines[:_MOST_LINES], f"and {left_out} more"] if left_out > 0 else lines


def _short(call: str) -> str:
    """`train.py:41 in main`: the folder is in report.json."""
    return call.rpartition("/")[2]
