"""The live view: the panel below a job, and the full screen of `ddpcheck watch`."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest
from rich.console import Console

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.live.tracker import LiveAgreement, LiveRank, LiveState, LiveStepTime
from ddpcheck.reports.terminal.console import ReportConsole
from ddpcheck.reports.terminal.live import (
    HEIGHT,
    agreement_text,
    clock_text,
    live_view,
    notable_ranks,
    panel_lines,
)

PARTS = {"data": 1000, "forward": 2000, "backward": 4000, "optimizer": 1000, "other": 0, "wait": 2000}


def rank(number: int, **more: object) -> LiveRank:
    given = {"host": "node0", "status": "running", "steps": 1240, "step_us": 10_000, "parts_us": PARTS}
    return LiveRank(rank=number, **{**given, "memory": 412_000_000 + number, **more})  # type: ignore[arg-type]


SOUND = LiveState(
    name="train",
    world_size=4,
    ranks=tuple(rank(number) for number in range(4)),
    agreement=LiveAgreement(1240),
    step_time=LiveStepTime(10_000, tuple(range(9000, 11_000, 100)), 0.08, 0.03, 2),
    seconds=133.0,
)
DIVERGED = replace(
    SOUND,
    agreement=LiveAgreement(1240, True, 3, "applied", (2,)),
    finding=Finding("DDP202", Severity.ERROR, "Gradients were \x1b[31mnot reduced", "", step=3, ranks=(2,)),
)


def console(**more: object) -> Console:
    return Console(file=io.StringIO(), width=80, **{"force_terminal": True, "no_color": True, **more})  # type: ignore[arg-type]


def plain(line: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


@pytest.mark.parametrize("columns", [40, 80, 200])
@pytest.mark.parametrize("state", [SOUND, DIVERGED, LiveState("train"), replace(SOUND, name="n" * 300)])
def test_a_panel_has_a_fixed_number_of_lines_that_fit(state: LiveState, columns: int) -> None:
    lines = panel_lines(state, console(), columns)
    assert len(lines) == HEIGHT
    for line in lines:
        assert len(plain(line)) < columns
        assert "\n" not in line
        # Nothing but colours: anything else would move the cursor.
        assert "\x1b" not in plain(line)


def test_a_healthy_run_below_its_output() -> None:
    title, course, step_time, finding_line = (plain(line) for line in panel_lines(SOUND, console(), 80))
    assert title.startswith("── ddpcheck train, 4 ranks, 2 min 13 s ──")
    assert course == "1,240 steps   replicas agree, 1,240 steps compared"
    assert re.fullmatch(r"10\.0 ms/step [▁-█]{10,}   exposed 8 %   waiting 3 %   memory 412\.0 MB", step_time)
    assert finding_line == "no findings yet"


def test_figures_come_before_bars() -> None:
    step_time = LiveStepTime(1_234_000, (1_234_000,) * 32, 0.44, 0.3, 127)
    ranks = tuple(rank(number, memory=(412 + number) * 10**6) for number in range(4))
    crowded = replace(SOUND, step_time=step_time, ranks=ranks)
    figures = "   exposed 44 %   waiting 30 % (rank 127)   memory 412.0-415.0 MB"
    assert plain(panel_lines(crowded, console(), 80)[2]) == f"1.23 s/step{figures}"
    assert plain(panel_lines(crowded, console(), 95)[2]) == f"1.23 s/step {'▄' * 17}{figures}"


def test_parameters_that_are_not_compared() -> None:
    for compared, others in ((0, ""), (1240, ", 1,240 steps of others agree")):
        agreement = LiveAgreement(compared, not_compared=6)
        text, style = agreement_text(replace(SOUND, agreement=agreement))
        assert (text, style) == (f"6 trained parameters not compared{others}", "bold yellow")


def test_diverged_replicas_and_text_of_the_job() -> None:
    _, course, _, finding_line = (plain(line) for line in panel_lines(DIVERGED, console(), 80))
    assert "replicas diverge at step 3 (outlier: rank 2)" in course
    assert finding_line == r"DDP202 at step 3: Gradients were \x1b[31mnot reduced (rank 2)"


def test_colours_only_where_they_are_wanted() -> None:
    coloured = "".join(panel_lines(SOUND, console(no_color=False, color_system="standard"), 80))
    assert "\x1b[32m" in coloured
    assert "\x1b[32m" not in "".join(panel_lines(SOUND, console(), 80))


def test_a_quiet_job_and_a_rank_that_raised() -> None:
    quiet = panel_lines(replace(SOUND, quiet_seconds=75.0, stalled=True), console(), 80)[-1]
    assert plain(quiet) == "no rank has made progress for 1 min 15 s"
    ranks = (*SOUND.ranks[:3], rank(3, status="raised", error="ValueError: bad\nsecond line"))
    raised = panel_lines(replace(SOUND, ranks=ranks, quiet_seconds=75.0, stalled=True), console(), 80)[-1]
    assert plain(raised) == "rank 3 raised: ValueError: bad"


def screen_of(state: LiveState) -> str:
    drawn = Console(file=io.StringIO(), width=80)
    ReportConsole(drawn).put(live_view(state, drawn))
    return drawn.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_full_screen_of_a_few_ranks() -> None:
    text = screen_of(SOUND)
    assert "train  running, 4 ranks, 2 min 13 s" in text
    assert "Ranks  4 running, all after 1,240 steps" in text
    rows = [line.split() for line in text.splitlines() if "node0" in line]
    assert [row[:3] for row in rows] == [[str(number), "node0", "1,240"] for number in range(4)]
    assert all(re.search(r"d+f+b+o+!+", line) for line in text.splitlines() if "node0" in line)
    assert max(map(len, text.splitlines())) <= 80


def test_of_a_thousand_ranks_the_notable_ones_are_shown() -> None:
    ranks = [rank(number) for number in range(1024)]
    ranks[700] = rank(700, steps=1238, parts_us={**PARTS, "wait": 0})
    ranks[9] = rank(9, status="raised", error="ValueError: bad")
    ranks[5] = rank(5, memory=900_000_000)
    state = replace(
        SOUND,
        world_size=1024,
        ranks=tuple(ranks),
        agreement=LiveAgreement(1238, True, 3, "params", (2,)),
        step_time=LiveStepTime(10_000, (10_000,) * 32, 0.0, 0.2, 700),
    )
    shown = {(reason, each.rank) for reason, each in notable_ranks(state)}
    assert {("outlier", 2), ("raised", 9), ("behind", 700), ("most memory", 5)} <= shown
    assert len(shown) <= 16
    text = screen_of(state)
    assert "1023 running, 1 raised" in text
    assert "1 behind, the slowest after 1,238 steps" in text
    assert len(text.splitlines()) < 30


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0.9, "0 s"), (59.9, "59 s"), (185, "3 min 05 s"), (7830, "2 h 10 min")]
)
def test_elapsed_time(seconds: float, expected: str) -> None:
    assert clock_text(seconds) == expected
