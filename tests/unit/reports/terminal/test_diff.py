"""A comparison on an 80-column terminal and as JSON, with names that are not to be trusted."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from typing import Any

from rich.console import Console

from ddpcheck.diff.model import (
    Comparison,
    DifferenceGrowth,
    DiffSource,
    DiffVerdict,
    FirstDifference,
    Method,
    RunInfo,
    Value,
)
from ddpcheck.reports.json_report import diff_to_json
from ddpcheck.reports.terminal.diff import render

SIDE = RunInfo("ddpcheck-runs/one", 0, 1, 24, "2.13.0", "cpu", ("torchrun", "train.py"))
FIRST = FirstDifference(
    step=3,
    stage=DiffSource.REDUCED,
    module=0,
    parameter="layers.0.weight",
    differing=2,
    tensors=6,
    ranks=(0, 1, 2, 3),
    message="gradient norm ratio 4.0 (= world size) in 2 of 6 parameters",
    values=(Value("sketch", 0.25, 1.0), Value("local norm, about", None, 0.11, 3)),
    agreed_until=2,
)
DIVERGED = Comparison(
    verdict=DiffVerdict.DIVERGED,
    method=Method.ROUNDING,
    a=SIDE,
    b=replace(SIDE, path="ddpcheck-runs/four", attempt=1, world_size=4),
    first=FIRST,
    cause="One run's gradients are a multiple of the other's.",
    then=(
        FirstDifference(4, DiffSource.HYPER, 0, None, 0, 6, (0,), "0.lr is 0.1 in run A and 0.4 in run B"),
    ),
    suspects=(Value("world size", 1, 4),),
    compared={"reduced": 24},
    growth=(DifferenceGrowth(2, 0, 1e-8, 0.01), DifferenceGrowth(3, 0, 3.0, 0.01)),
    notes=("Something to know.",),
)
AGREED = replace(
    DIVERGED, verdict=DiffVerdict.AGREE, first=None, cause="", then=(), suspects=(), growth=(), notes=()
)


def shown(comparison: Comparison, **options: Any) -> list[str]:
    file = io.StringIO()
    render(comparison, Console(file=file, **{"width": 80, "color_system": None, **options}))
    return file.getvalue().splitlines()


def test_the_complete_report() -> None:
    assert shown(DIVERGED) == [
        "The runs diverge at step 3, stage reduced, module 0, parameter layers.0.weight",
        "and 1 more of 6, ranks 0-3",
        "  Gradient norm ratio 4.0 (= world size) in 2 of 6 parameters.",
        "",
        "  why  One run's gradients are a multiple of the other's.",
        "",
        "run A  ddpcheck-runs/one, attempt 0: 1 rank, 24 steps, torch 2.13.0, cpu",
        "run B  ddpcheck-runs/four, attempt 1: 4 ranks, 24 steps, torch 2.13.0, cpu",
        "",
        "Values of layers.0.weight",
        "                             run A  run B",
        "  sketch                     0.25   1",
        "  local norm, about  rank 3  -      0.11",
        "",
        "Next differences",
        "  step  stage            parameter  differ",
        "  4     hyperparameters                     0.lr is 0.1 in run A and 0.4 in run",
        "                                            B",
        "",
        "Other differences",
        "              run A  run B",
        "  world size  1      4",
        "",
        "Reduced gradients: relative difference",
        "  step  difference  tolerance",
        "  2     1e-08       0.01",
        "  3     3           0.01       beyond rounding",
        "",
        "compared  reduced 24",
        "",
        "Something to know.",
    ]


def test_agreement() -> None:
    lines = shown(AGREED)
    assert lines[0] == "The runs agree within rounding over 24 steps"
    assert not any("differs" in line for line in lines)
    exact = shown(replace(AGREED, method=Method.EXACT))
    assert exact[0] == "The runs agree bit for bit over 24 steps"


def test_steps_that_were_not_compared_are_named() -> None:
    lines = shown(replace(DIVERGED, first=replace(FIRST, step=20, agreed_until=7)))
    assert lines[0].startswith("The runs diverge at step 20 (last compared and equal at step 7)")


def test_close_numbers_get_more_digits() -> None:
    close = replace(FIRST, values=(Value("sketch", 0.5253219, 0.5253218), Value("norm", 0.3, 0.3)))
    words = [line.split() for line in shown(replace(DIVERGED, first=close))]
    assert ["sketch", "0.5253219", "0.5253218"] in words
    assert ["norm", "0.3", "0.3"] in words


def test_after_wrapping() -> None:
    start = replace(FIRST, step=-1, stage=DiffSource.INIT, agreed_until=None)
    assert shown(replace(DIVERGED, first=start))[0].startswith(
        "The runs diverge after wrapping, stage init.after"
    )


def test_nothing_else_differs() -> None:
    lines = shown(replace(DIVERGED, suspects=()))
    assert "Nothing else that was recorded differs between the runs." in lines


def test_a_long_run_shows_the_first_step_beyond_tolerance() -> None:
    growth = tuple(DifferenceGrowth(step, 0, 1e-8 if step < 137 else 1.0, 0.1) for step in range(1000))
    lines = shown(replace(DIVERGED, growth=growth))
    table = lines[lines.index("Reduced gradients: relative difference") :]
    assert any(line.split()[:1] == ["137"] and "beyond rounding" in line for line in table)
    assert len(table) < 20


def test_many_ranks_fit() -> None:
    values = tuple(Value("digest", "0" * 16, "f" * 16, rank) for rank in range(64))
    wide = replace(FIRST, ranks=tuple(range(64)), values=values)
    suspects = tuple(Value(f"environment: NCCL_{n}", "x" * 400, None) for n in range(40))
    lines = shown(replace(DIVERGED, first=wide, suspects=suspects))
    assert "  and 52 more, in --json" in lines
    assert "  and 28 more, in --json" in lines
    assert max(map(len, lines)) <= 80


def test_text_of_the_job_is_only_text() -> None:
    nasty = replace(FIRST, parameter="[red]\x1b[31mevil\n", message="\x07 [bold]")
    text = "\n".join(shown(replace(DIVERGED, first=nasty)))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert r"[red]\x1b[31mevil\n" in text


def test_json_is_strict_and_complete() -> None:
    outlier = replace(FIRST, values=(Value("sketch", float("nan"), float("inf"), 0),), parameter="\udcff")
    document = json.loads(diff_to_json(replace(DIVERGED, first=outlier)))
    assert list(document) == [
        *("schema", "verdict", "method", "first", "cause", "suspects", "then", "notes", "a", "b"),
        *("compared", "growth", "speed"),
    ]
    assert document["first"]["values"] == [{"what": "sketch", "a": "nan", "b": "inf", "rank": 0}]
    assert document["first"]["stage"] == "reduced"
    assert document["first"]["parameter"] == "\\udcff"
    assert document["growth"][1] == {"step": 3, "module": 0, "relative": 3.0, "tolerance": 0.01}
    assert document["b"]["world_size"] == 4
    assert json.loads(diff_to_json(AGREED))["first"] is None
