"""A run under way on a whole screen: what the panel under a job says, and its ranks, or those that stand out."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.text import Text

from ddpcheck.analysis.live.state import LiveRank, LiveState
from ddpcheck.analysis.units import size_text
from ddpcheck.reports.live_text import (
    agreement_text,
    clock_text,
    finding_text,
    memory_text,
    pace_texts,
    ranks_text,
    status_text,
)
from ddpcheck.reports.spark import SPARK, spark
from ddpcheck.reports.terminal.console import LABEL, QUIET, Ink, indented
from ddpcheck.reports.terminal.timing import step_bar, step_key
from ddpcheck.reports.trace_units import time_text

# Up to so many ranks have a row each; of more, so many of each kind that stands out.
_MOST_ROWS = 16
_MOST_OF_A_KIND = 4
_BARS = 32
_BAR = 22
_STYLES = {"running": "", "finished": "green", "raised": "bold red", "vanished": "bold red"}


def live_view(state: LiveState, console: Console) -> RenderableType:
    """The state as it is at this moment."""
    ink = Ink(console)
    blocks = [_title(ink, state), Text(), _course(ink, state), *_pace(ink, state), _found(ink, state)]
    if state.ranks:
        blocks += [Text(), *_ranks(ink, state)]
    return Group(*blocks)


def _title(ink: Ink, state: LiveState) -> Text:
    condition = "ended" if state.ended else "its launcher is gone" if state.abandoned else "under way"
    told = f"  {condition}, {ranks_text(state)}, {clock_text(state.seconds)}"
    return Text.assemble(ink.text(state.name, LABEL), ink.text(told, QUIET))


def _course(ink: Ink, state: LiveState) -> Text:
    said, style = agreement_text(state)
    return Text.assemble(ink.text(f"step {state.steps:,}   ", LABEL), ink.text(said, style))


def _pace(ink: Ink, state: LiveState) -> list[RenderableType]:
    if state.pace is None:
        return []
    step, *shares = pace_texts(state.pace)
    bars = spark(state.pace.course_us, _BARS, ink.console.options.ascii_only)
    figures = ink.text("   ".join(filter(None, [*shares, memory_text(state)])))
    return [Text.assemble(ink.text(f"{step} "), ink.text(bars, SPARK)), figures]


def _found(ink: Ink, state: LiveState) -> Text:
    said, style = finding_text(state)
    return ink.text(said, style)


def _ranks(ink: Ink, state: LiveState) -> list[RenderableType]:
    shown = standing_out(state)
    few = len(state.ranks) <= _MOST_ROWS
    longest = max((rank.step_us or 0 for _, rank in shown), default=0)
    headers = ["rank", "host", "steps", "a step", step_key(), "memory", "status" if few else "because it"]
    rows = [_row(ink, rank, longest, rank.status if few else why) for why, rank in shown]
    told = f"  {status_text(state)}, {_spread(state)}"
    title = Text.assemble(ink.text("Ranks", LABEL), ink.text(told, QUIET))
    return [title, indented(ink.columns(headers, rows))] if rows else [title]


def _spread(state: LiveState) -> str:
    if state.fewest_steps == state.steps:
        return f"all at step {state.steps:,}"
    behind = sum(rank.steps < state.steps for rank in state.ranks)
    return f"{behind} behind, from step {state.fewest_steps:,} on"


def _row(ink: Ink, rank: LiveRank, longest: int, why: str) -> list[object]:
    return [
        rank.rank,
        rank.host,
        f"{rank.steps:,}",
        "-" if rank.step_us is None else time_text(rank.step_us * 1000),
        step_bar(rank.parts_us, longest, _BAR),
        size_text(rank.memory) if rank.memory else "-",
        ink.text(why, _STYLES.get(rank.status, "")),
    ]


def standing_out(state: LiveState) -> list[tuple[str, LiveRank]]:
    """All of a few ranks; of many those that somebody would look for, each with why, and once."""
    if len(state.ranks) <= _MOST_ROWS:
        return [("", rank) for rank in state.ranks]
    odd = set(state.agreement.odd)
    clocked = [rank for rank in state.ranks if rank.step_us]
    late = state.pace is not None and state.pace.late >= 0.1
    kinds: Sequence[tuple[str, list[LiveRank]]] = (
        ("stands apart", [rank for rank in state.ranks if rank.rank in odd]),
        ("raised", [rank for rank in state.ranks if rank.status == "raised"]),
        ("vanished", [rank for rank in state.ranks if rank.status == "vanished"]),
        ("is behind", sorted((r for r in state.ranks if r.steps < state.steps), key=lambda r: r.steps)),
        ("is waited for", sorted(clocked, key=lambda r: r.parts_us.get("wait", 0)) if late else []),
        ("holds most", sorted(state.ranks, key=lambda r: -r.memory)[:1]),
    )
    shown: dict[int, tuple[str, LiveRank]] = {}
    for why, ranks in kinds:
        for rank in ranks[:_MOST_OF_A_KIND]:
            shown.setdefault(rank.rank, (why, rank))
    return list(shown.values())
