"""Saved gradients on an 80-column terminal, for one rank and for many, with names that are not to be trusted."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping

from rich.console import Console

from ddpcheck.analysis.allreduce.saved_gradients import SavedGradients, SavedParameter, SavedStage
from ddpcheck.reports.terminal.evidence import render_gradients


def side(*values: float | str) -> SavedStage:
    return SavedStage(math.hypot(*(x for x in values if not isinstance(x, str))), values)


def parameter(
    name: str = "cat",
    local: Mapping[int, SavedStage] | None = None,
    reduced: Mapping[int, SavedStage] | None = None,
    equal: bool = True,
    off_mean: float | None = 0.0,
    before: Mapping[int, SavedStage] | None = None,
    after: Mapping[int, SavedStage] | None = None,
    shape: tuple[int, ...] = (2,),
) -> SavedParameter:
    return SavedParameter(
        name,
        "float32",
        shape,
        {0: side(1.0, 2.0), 1: side(3.0, 6.0)} if local is None else local,
        {0: side(2.0, 4.0), 1: side(2.0, 4.0)} if reduced is None else reduced,
        before or {},
        after or {},
        equal,
        off_mean,
    )


def shown(*parameters: SavedParameter, missing: tuple[int, ...] = (), width: int = 80) -> list[str]:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=False, color_system=None)
    render_gradients([SavedGradients(3, 0, (0, 1), parameters, missing)], console)
    return file.getvalue().splitlines()


def test_the_complete_report() -> None:
    same = {0: side(0.5, 0.5), 1: side(0.5, 0.5)}
    lines = shown(parameter(before=same, after={0: side(0.25, 0.0), 1: side(0.25, 0.0)}, off_mean=1.5e-8))
    assert lines == [
        "Step 3, module 0: reduced gradients are the same on all ranks",
        "",
        "cat (float32 2)",
        "                             norm      first values",
        "  weights before, all ranks  0.707107  0.5  0.5",
        "  local gradient, rank 0     2.23607   1  2",
        "  local gradient, rank 1     6.7082    3  6",
        "  reduced, all ranks         4.47214   2  4",
        "  weights after, all ranks   0.25      0.25  0",
        "  reduced differs from the mean by at most 1.5e-08",
    ]


def test_results_that_differ_are_shown_by_rank() -> None:
    outlier = parameter("odd", reduced={0: side(2.0, 4.0), 1: side(2.0, 5.0)}, equal=False, off_mean=1.0)
    lines = shown(parameter(), outlier)
    assert lines[0] == "Step 3, module 0: reduced gradients differ in 1 of 2 parameters"
    assert any(line.startswith("  reduced rank 1") and line.endswith("2  5") for line in lines)


def test_equal_gradients_of_ranks_are_still_listed_each() -> None:
    """Local gradients of all ranks are always listed."""
    lines = shown(parameter(local={0: side(1.0), 1: side(1.0)}))
    assert sum(line.startswith("  local gradient, rank") for line in lines) == 2


def test_nothing_was_reduced() -> None:
    lines = shown(parameter(local={}, reduced={}, off_mean=None, after={0: side(1.0), 1: side(2.0)}))
    assert lines[0] == "Step 3, module 0: no reduced gradients were saved"
    assert not any("same on all ranks" in line or "from the mean" in line for line in lines)


def test_missing_ranks_are_named() -> None:
    lines = shown(parameter(off_mean=None), missing=(2, 3, 4))
    assert lines[0] == "Step 3, module 0: reduced gradients are the same on all ranks that were saved"
    assert lines[1] == "no gradients of ranks 2-4 were saved: the mean cannot be checked"


def test_many_ranks() -> None:
    crowd = {rank: side(float(rank)) for rank in range(1000)}
    lines = shown(parameter(local=crowd, after=crowd))
    assert sum(line.startswith("  local gradient, rank") for line in lines) == 8
    assert sum(line.strip() == "and 992 more ranks" for line in lines) == 2
    assert len(lines) < 30


def test_many_parameters() -> None:
    lines = shown(*(parameter(f"layer.{n}") for n in range(300)))
    assert sum(line.startswith("layer.") for line in lines) == 40
    assert lines[-1] == "and 260 more parameters, in the folder gradients"


def test_as_many_as_are_shown_leaves_none_out() -> None:
    assert not any("more parameters" in line for line in shown(*(parameter(f"p{n}") for n in range(40))))


def test_no_line_exceeds_the_width() -> None:
    long = parameter("block." * 60 + "weight", local={12345: side(*[-1.23456e-30] * 4)}, shape=(4096,) * 12)
    lines = shown(long)
    assert max(map(len, lines)) <= 80
    # Folded, not cut.
    assert "".join(lines).count("block.") == 60
    assert not any(line != line.rstrip() for line in lines)


def test_names_cannot_control_the_terminal() -> None:
    evil = "\x1b[2J\x1b]0;owned\x07w\r\n[red]x[/red]\u202e\x9b1m"
    text = "\n".join(shown(parameter(evil, local={0: SavedStage(1.0, ("\x1b[31m0xff",))})))
    assert not any(ord(char) < 32 and char != "\n" for char in text)
    assert not any(char in text for char in "\x7f\x9b\u202e")
    # No markup either: the brackets are part of the name.
    assert "[red]x[/red]" in text.replace("\n", "")


def test_values_that_are_not_finite() -> None:
    lines = shown(parameter(local={0: SavedStage(math.nan, (math.nan, math.inf, "0xff"))}, shape=()))
    assert "cat (float32 scalar)" in lines
    assert any(
        line.split() == ["local", "gradient,", "rank", "0", "nan", "nan", "inf", "0xff"] for line in lines
    )
