"""The table of hosts: only for several hosts, cut for many."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from pathlib import Path

from rich.console import Console

from ddpcheck.analysis.timing.collector import HostClock
from ddpcheck.reports.terminal.report import Detail, render
from tests.helpers.run_builder import RunBuilder


def shown(folder: Path, *hosts: HostClock) -> str:
    report = replace(RunBuilder(folder, 2).wrap().train(2).end().report(), hosts=hosts)
    console = Console(file=StringIO(), width=80)
    render(report, console, detail=Detail.ALL)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_one_host_has_no_table(tmp_path: Path) -> None:
    assert "Hosts" not in shown(tmp_path)


def test_clock_offsets_with_their_uncertainty(tmp_path: Path) -> None:
    text = shown(
        tmp_path,
        HostClock("first", (0,), 0.0, 0.0, 0, reference=True),
        HostClock("ahead", (1, 2), 0.25, 0.002, 50),
        HostClock("far", (6,), 2.5011, 0.0035, 50),
        HostClock("behind", (3,), -0.0015, 0.0001, 50),
        HostClock("unknown", (4,), None, None, 1),
        HostClock("away", (5,), None, None, 0, here=False),
    )
    assert "250 ms ahead (+/- 2 ms)" in text
    assert "2.501 s ahead (+/- 3.5 ms)" in text
    assert "1.5 ms behind (+/- 0.1 ms)" in text
    assert "unknown: too few common steps" in text
    assert "records are missing: see ddpcheck merge" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_many_hosts_are_cut(tmp_path: Path) -> None:
    text = shown(tmp_path, *(HostClock(f"host{n:03d}", (n,), 0.0, 0.0, 9) for n in range(100)))
    assert "host007" in text
    assert "host008" not in text
    assert "8 of 100 hosts are shown" in text
