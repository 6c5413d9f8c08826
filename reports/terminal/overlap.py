"""Overlap and waiting of the profiled steps: a row and a bar for each rank."""

from __future__ import annotations

from rich.text import Text

from ddpcheck.analysis.overlap.model import Overlap, RankOverlap
from ddpcheck.analysis.report import Report
from ddpcheck.formatting import percent_text, time_text
from ddpcheck.reports.terminal.console import LABEL, QUIET, ReportConsole, indented
from ddpcheck.reports.terminal.timing import bar, legend
from ddpcheck.traces.model import Shares

_MOST_RANKS = 8
_BAR = 24


def put_overlap(ink: ReportConsole, report: Report) -> None:
    """What a step of each rank was made of, and what could not be told."""
    seen = report.overlap
    if seen is None:
        return
    ink.gap()
    ink.put(ink.text(_title(seen), LABEL))
    if seen.ranks:
        longest = max(rank.span_ns for rank in seen.ranks)
        rows = [_row(rank, max(len(seen.steps), 1), longest) for rank in seen.ranks[:_MOST_RANKS]]
        headers = ["rank", "comm", "hidden", "exposed", "waited", "last", ""]
        ink.put(indented(ink.columns(headers, rows)))
        ink.put(legend(), indent=2)
    if len(seen.ranks) > _MOST_RANKS:
        ink.put(ink.text(f"and {len(seen.ranks) - _MOST_RANKS} more ranks, in report.json", QUIET), indent=2)
    for sentence in seen.left_out:
        ink.put(ink.text(sentence, "yellow"), indent=2)


def _title(seen: Overlap) -> str:
    of_user = " of the program's own profile" if seen.source == "user" and seen.ranks else ""
    if not seen.steps:
        return f"Overlap{of_user}"
    took = sum(step.took_ns for step in seen.steps) // len(seen.steps)
    last = seen.end_step - 1
    which = f"steps {seen.first_step}-{last}" if last > seen.first_step else f"step {last}"
    return f"Overlap in {which}{of_user}; times a step, which took {time_text(took)}"


def _row(rank: RankOverlap, steps: int, longest: int) -> list[object]:
    told = rank.exposed_transfer_ns is not None
    exposed = rank.exposed_transfer_ns if rank.exposed_transfer_ns is not None else rank.exposed_ns
    return [
        rank.rank,
        time_text(rank.comm_ns // steps),
        percent_text(rank.overlap_pct),
        time_text(exposed // steps),
        time_text((rank.exposed_wait_ns or 0) // steps) if told else "",
        f"{rank.last_arrivals}x" if rank.last_arrivals else "",
        _bar(rank, longest),
    ]


def _bar(rank: RankOverlap, longest: int) -> Text:
    shares = Shares(
        span_ns=rank.span_ns,
        comm_ns=rank.comm_ns,
        compute_ns=rank.compute_ns,
        overlap_ns=rank.overlap_ns,
        exposed_ns=rank.exposed_ns,
        copy_ns=rank.copy_ns,
        idle_ns=rank.idle_ns,
    )
    return bar(shares, longest, _BAR)
