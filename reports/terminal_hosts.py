"""The table of hosts, where there are several: their ranks and how far their clocks are apart."""

from __future__ import annotations

from ddpcheck.analysis.report import Report
from ddpcheck.analysis.timing.clock_offsets import HostClock
from ddpcheck.formatting import rank_ranges
from ddpcheck.reports.terminal.console import LABEL, Ink, indented

_MOST_ROWS = 8


def put_hosts(ink: Ink, report: Report) -> None:
    """Nothing for a job on one host."""
    if not report.hosts:
        return
    ink.gap()
    rows = [[host.host, rank_ranges(host.ranks), _clock(host)] for host in report.hosts[:_MOST_ROWS]]
    ink.put(ink.text("Hosts", LABEL), indented(ink.columns(["host", "ranks", "clock"], rows)))
    more = len(report.hosts) - _MOST_ROWS
    if more > 0:
        ink.put(ink.text(f"{more} more are in report.json"), indent=2)


def _clock(host: HostClock) -> str:
    if not host.here:
        return "its records are elsewhere: see ddpcheck merge"
    if host.reference:
        return "the others are compared with it"
    if host.offset is None or host.uncertainty is None:
        return "not known: too few common steps"
    way = "ahead" if host.offset >= 0 else "behind"
    return f"{_time(abs(host.offset))} {way}, give or take {_time(max(host.uncertainty, 1e-6))}"


def _time(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
