"""Traces on the terminal: a summary, then ranks, steps, buckets and operations."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ddpcheck.formatting import name_ranks, optional_size_text, percent_text, rate_text, time_text
from ddpcheck.reports.terminal.charts import overlap_bar, overlap_legend
from ddpcheck.reports.terminal.console import LABEL, QUIET, ReportConsole
from ddpcheck.traces.model import RankResult, TraceResult

_MOST_RANKS = 16
_MOST_STEPS = 8
_MOST_ROWS = 12
_WIDEST_BAR = 72


def render(
    result: TraceResult, console: Console, left_out: Sequence[str] = (), merged: Path | None = None
) -> None:
    """Write `result` to `console`."""
    out = ReportConsole(console)
    for number, sentence in enumerate(sentences(result)):
        out.put(out.text(sentence, LABEL if number == 0 else ""))
    _ranks(out, result)
    _bars(out, result)
    _steps(out, result)
    _buckets(out, result)
    _operations(out, result)
    for line in _notes(result, merged):
        out.gap()
        out.put(out.text(line))
    for reason in left_out:
        out.gap()
        out.put(out.text(f"left out: {reason}", "yellow"))


def sentences(result: TraceResult) -> list[str]:
    """The main figures in sentences."""
    head = result.headline
    many = len(result.ranks) > 1
    of_each = f" on each of {len(result.ranks)} ranks (mean)" if many else ""
    lines = [
        f"{time_text(head.comm_ns)} of communication{of_each}, {percent_text(head.overlap_pct)} hidden behind "
        f"compute; {time_text(head.exposed_ns)} exposed in {time_text(head.span_ns)}."
    ]
    if head.wait_ns is not None and head.transfer_ns is not None:
        lines.append(
            f"In {head.matched} collectives a rank waited {time_text(head.wait_ns)} (mean) for the last rank to "
            f"arrive; the transfers took {time_text(head.transfer_ns)}."
        )
    if head.most_often_last is not None:
        lines.append(
            f"Rank {head.most_often_last} arrived last most often: in {head.times_last} of {head.matched} collectives."
        )
    return lines


def _ranks(out: ReportConsole, result: TraceResult) -> None:
    together = result.transfer_ns is not None
    headers = ["rank", "comm", "hidden", "", "exposed", "compute", "idle"]
    headers += ["waited", "last"] if together else []
    rows = []
    for rank in _shown(result):
        shares = rank.shares
        row = [
            str(rank.rank),
            time_text(shares.comm_ns),
            time_text(shares.overlap_ns),
            percent_text(shares.overlap_pct),
            time_text(shares.exposed_ns),
            time_text(shares.compute_ns),
            time_text(shares.idle_ns),
        ]
        rows.append([*row, time_text(rank.wait_ns), _times(rank.last_arrivals)] if together else row)
    _table(out, "Ranks", headers, rows, len(result.ranks))


def _times(count: int | None) -> str:
    return f"{count}x" if count else ""


def _bars(out: ReportConsole, result: TraceResult) -> None:
    shown = _shown(result)
    longest = max(rank.shares.span_ns for rank in shown)
    labels = max(len(str(rank.rank)) for rank in shown)
    width = min(_WIDEST_BAR, out.console.width - labels - 4)
    out.gap()
    out.put(
        *(out.text(f"{rank.rank:>{labels}}  ") + overlap_bar(rank.shares, longest, width) for rank in shown),
        indent=2,
    )
    out.put(overlap_legend(), indent=labels + 4)


def _steps(out: ReportConsole, result: TraceResult) -> None:
    """Steps of the first rank only; the JSON has all ranks."""
    first = result.ranks[0]
    if len(first.steps) < 2:
        return
    rows = [
        (
            str(each.step),
            time_text(each.shares.span_ns),
            time_text(each.shares.comm_ns),
            percent_text(each.shares.overlap_pct),
            time_text(each.shares.exposed_ns),
            time_text(each.shares.compute_ns),
            time_text(each.shares.idle_ns),
        )
        for each in first.steps[:_MOST_STEPS]
    ]
    which = f"Steps of rank {first.rank}" if len(result.ranks) > 1 else "Steps"
    headers = ["step", "took", "comm", "hidden", "exposed", "compute", "idle"]
    _table(out, which, headers, rows, len(first.steps))


def _buckets(out: ReportConsole, result: TraceResult) -> None:
    rows = [
        (
            str(each.bucket),
            optional_size_text(each.bytes),
            f"{each.count}x",
            time_text(each.queued_ns),
            time_text(each.duration_ns),
            time_text(each.transfer_ns),
            percent_text(each.hidden_pct),
            rate_text(each.algbw_gbps),
            rate_text(each.busbw_gbps),
        )
        for each in result.buckets[:_MOST_ROWS]
    ]
    headers = ["bucket", "size", "", "queued", "took", "transfer", "hidden", "algorithm", "bus"]
    _table(out, "DDP's buckets (medians)", headers, rows, len(result.buckets))


def _operations(out: ReportConsole, result: TraceResult) -> None:
    others = [each for each in result.operations if not each.of_ddp]
    rows = [
        (
            each.kind,
            optional_size_text(each.bytes),
            f"{each.count}x",
            time_text(each.duration_ns),
            time_text(each.transfer_ns),
            time_text(each.skew_ns),
            rate_text(each.algbw_gbps),
            rate_text(each.busbw_gbps),
        )
        for each in others[:_MOST_ROWS]
    ]
    headers = ["operation", "size", "", "took", "transfer", "skew", "algorithm", "bus"]
    title = "Other collectives by size (medians)" if result.buckets else "Collectives by size (medians)"
    _table(out, title, headers, rows, len(others))


def _table(
    out: ReportConsole, title: str, headers: Sequence[str], rows: Sequence[Sequence[str]], of: int
) -> None:
    if not rows:
        return
    # Empty columns are left out.
    kept = [index for index in range(len(headers)) if any(row[index] for row in rows)]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for index in kept:
        table.add_column(
            out.text(headers[index], QUIET), justify="left" if index == 0 else "right", no_wrap=True
        )
    for row in rows:
        table.add_row(*(out.text(row[index]) for index in kept))
    out.gap()
    out.put(out.text(title, LABEL))
    out.put(table, indent=2)
    if of > len(rows):
        out.put(out.text(f"and {of - len(rows)} more, in --json", QUIET), indent=2)


def _shown(result: TraceResult) -> Sequence[RankResult]:
    return result.ranks[:_MOST_RANKS]


def _notes(result: TraceResult, merged: Path | None) -> Iterable[str]:
    present, world = len(result.ranks), result.world_size
    if world and present < world:
        lacking = (
            "bandwidths include waiting, which one rank alone cannot separate from transfer"
            if present == 1
            else "the other ranks are unknown"
        )
        yield f"{name_ranks(rank.rank for rank in result.ranks).capitalize()} of {world} given: {lacking}."
    corrected = [rank for rank in result.ranks if rank.clock and rank.clock.corrected]
    if corrected:
        clocks = ", ".join(
            f"rank {rank.rank} by {time_text(rank.clock.offset_ns)} (scatter {time_text(rank.clock.residual_ns)})"
            for rank in corrected[:_MOST_ROWS]
            if rank.clock
        )
        yield f"Clock offsets were corrected by the ends of collectives: {clocks}."
    if result.unmatched:
        yield (
            f"{result.unmatched} collectives could not be matched across ranks: their counts differ, or they "
            "began before the recording."
        )
    if merged is not None:
        yield f"One timeline of all ranks is in {merged}; open it in Perfetto or chrome://tracing."
