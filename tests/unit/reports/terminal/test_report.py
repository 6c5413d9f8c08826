"""The terminal report: order, width, and safe text of the job."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import AttemptSummary, Check, RankStatus, RankSummary, Report, Verdict
from ddpcheck.analysis.timeseries.model import AgreementHistory
from ddpcheck.reports.terminal.report import Detail, render, verdict_style

DIVERGENCE_EVIDENCE: dict[str, Any] = {
    "groups": [
        {"ranks": [0, 1, 3], "digest": "9f2c6a1d77e0b3a49f2c6a1d77e0b3a4"},
        {"ranks": [2], "digest": "11aa22bb33cc44dd11aa22bb33cc44dd"},
    ],
    "parameters": {"count": 12, "of": 148, "names": [f"layers.{i}.attention.weight" for i in range(10)]},
    "elements": {
        "parameter": "layers.3.weight",
        "differing": 812,
        "of": 4096,
        "exact": True,
        "step": 3,
        "shape": [64, 64],
        "dtype": "float32",
        "values": [
            {"index": [0, 3], "by_rank": {str(rank): 0.123 + (rank == 2) for rank in range(4)}},
            {"index": [0, 4], "by_rank": {"0": "nan", "1": "nan", "2": -1.5e-7, "3": "nan"}},
        ],
    },
    "hyperparameters": [
        {"optimizer": 0, "group": 0, "name": "lr", "by_rank": {"0": 0.1, "1": 0.1, "2": 0.01, "3": 0.1}}
    ],
    "steps_by_rank": {"0": 120, "1": 120, "2": 119, "3": 120},
    "note": "anything else a rule has to say",
}
DIVERGENCE = Finding(
    code="DDP201",
    severity=Severity.ERROR,
    title="Parameters diverged",
    message="After step 3 rank 2 holds other parameters than the rest.",
    module="0",
    step=3,
    stage="params",
    parameter="layers.3.weight",
    ranks=(2,),
    evidence=DIVERGENCE_EVIDENCE,
    cause="rank 2 used another learning rate",
    fix="read the learning rate from one place on every rank",
)


def rank_rows(world: int, **changes: Any) -> tuple[RankSummary, ...]:
    row = RankSummary(rank=0, status=RankStatus.FINISHED, host="node-a", device="cpu", steps=120)
    return tuple(replace(row, rank=rank, **changes) for rank in range(world))


def make_report(**changes: Any) -> Report:
    plain = Report(
        verdict=Verdict.OK,
        world_size=4,
        steps=120,
        command=("torchrun", "train.py"),
        exit_code=0,
        findings=(),
        attempts=(AttemptSummary(0, 4, 120, rank_rows(4)),),
        checks=(
            Check("parameters after each step", 480, "agree", "120 steps x 4 ranks, 148 parameters"),
            Check("optimizer state", 0, "not checked", "ask for it with --optimizer-state"),
        ),
        run={"path": "ddpcheck-runs/20261116-101500-train", "parameters": 148},
    )
    return replace(plain, **changes)


DIVERGED = make_report(verdict=Verdict.FINDINGS, findings=(DIVERGENCE,))


def rendered(
    report: Report,
    width: int = 80,
    encoding: str = "utf-8",
    page: Path | None = None,
    detail: Detail = Detail.SUMMARY,
    **console: Any,
) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding, newline="\n")
    render(report, Console(file=file, width=width, **console), page, detail)
    file.flush()
    return raw.getvalue().decode(encoding)


def squeezed(text: str) -> str:
    return " ".join(text.split())


def test_the_verdict_comes_last_with_what_to_do_next() -> None:
    assert rendered(make_report()).splitlines()[-2:] == [
        "Replicas agree: 4 ranks, 120 steps, 148 parameters compared after every step",
        "Next: ddpcheck report ddpcheck-runs/20261116-101500-train -v",
    ]
    assert rendered(DIVERGED).splitlines()[-2:] == [
        "Replicas diverge at step 3 in layers.3.weight (DDP201)",
        "Next: ddpcheck explain DDP201   Run: ddpcheck-runs/20261116-101500-train",
    ]


def test_a_page_that_was_written_is_named() -> None:
    assert rendered(DIVERGED, page=Path("out/report.html")).endswith("Page: out/report.html\n")


def test_the_line_of_the_program_stands_beside_the_verdict(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import torch\n\n    loss.backward()\n    optimizer.step()  \x1b[31m\n")
    history = AgreementHistory("0", "Net", (0, 1, 2, 3), (), stepped_at=f"{script}:4")
    lines = rendered(replace(DIVERGED, agreement=(history,)), width=200).splitlines()
    assert lines[-2].endswith("train.py:4  optimizer.step()  \\x1b[31m")
    missing = replace(history, stepped_at=f"{tmp_path / 'gone.py'}:4")
    assert rendered(replace(DIVERGED, agreement=(missing,)), width=200).splitlines()[-2].endswith("gone.py:4")


def test_details_on_request() -> None:
    assert len(rendered(DIVERGED, detail=Detail.OUTCOME).splitlines()) == 2
    summary, every = rendered(DIVERGED), rendered(DIVERGED, detail=Detail.ALL)
    assert "Checked" in every
    assert "Checked" not in summary
    assert summary.index("fix ") < summary.index("Ranks grouped by identical weights")


def test_evidence_of_notes_only_with_all_tables() -> None:
    note = replace(DIVERGENCE, severity=Severity.NOTE)
    report = make_report(findings=(note,))
    assert "Ranks grouped" not in rendered(report)
    assert "Ranks grouped" in rendered(report, detail=Detail.ALL)


@pytest.mark.parametrize(
    ("severity", "style"),
    [(Severity.ERROR, "bold red"), (Severity.WARNING, "bold yellow"), (Severity.NOTE, "bold green")],
)
def test_the_colour_is_that_of_the_worst_finding(severity: Severity, style: str) -> None:
    verdict = Verdict.OK if severity is Severity.NOTE else Verdict.FINDINGS
    assert (
        verdict_style(make_report(verdict=verdict, findings=(replace(DIVERGENCE, severity=severity),)))
        == style
    )


def test_a_divergence_shows_ranks_location_and_fix() -> None:
    text = squeezed(rendered(DIVERGED))
    for expected in (
        "error DDP201 Parameters diverged",
        "step 3, stage params, module 0, parameter layers.3.weight, rank 2",
        "ranks 0-1 and 3 9f2c6a1d77e0b3a4",
        "12 of 148 tensors differ",
        "and 2 more",
        "812 of 4096 elements differ in layers.3.weight (float32 [64, 64]) at step 3:",
        "group 0, lr",
        "steps by rank: ranks 0-1 and 3: 120; rank 2: 119",
        "note: anything else a rule has to say",
        "why rank 2 used another learning rate",
        "fix read the learning rate from one place on every rank",
        "ddpcheck explain DDP201",
    ):
        assert expected in text


def test_values_are_side_by_side() -> None:
    text = rendered(DIVERGED, width=120)
    header = next(line for line in text.splitlines() if line.split()[:1] == ["element"])
    row = next(line for line in text.splitlines() if line.strip().startswith("[0, 3]"))
    assert header.split() == ["element", "rank", "0", "rank", "1", "rank", "2", "rank", "3"]
    assert row.split() == ["[0,", "3]", "0.123", "0.123", "1.123", "0.123"]
    assert header.index("rank 2") == row.index("1.123")


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("coloured", [False, True])
def test_no_line_is_wider_than_the_terminal(width: int, coloured: bool) -> None:
    long_name = "backbone." * 30 + "weight"
    report = replace(DIVERGED, findings=(replace(DIVERGENCE, parameter=long_name, message="模型" * 90),))
    text = rendered(report, width, no_color=not coloured)
    assert max(cell_len(line) for line in text.splitlines()) <= width
    assert all(line == line.rstrip() for line in text.splitlines())


def test_without_colour_no_escape_is_written() -> None:
    assert "\x1b" not in rendered(DIVERGED, force_terminal=False)
    assert "\x1b[" in rendered(DIVERGED, force_terminal=True, color_system="standard")


def test_text_from_the_job_is_only_text() -> None:
    nasty = "[red]x[/red]\x1b[31m\r\u202e:smile:"
    finding = replace(
        DIVERGENCE,
        parameter=nasty,
        message=nasty,
        title=nasty,
        cause=nasty,
        evidence={nasty: nasty, "groups": nasty, "parameters": {"count": 1, "of": 1, "names": [nasty]}},
    )
    rows = rank_rows(1, host=nasty, device=nasty, detail=nasty)
    report = make_report(
        verdict=Verdict.FINDINGS,
        findings=(finding,),
        attempts=(AttemptSummary(0, 1, 1, rows),),
        checks=(Check(nasty, 1, nasty, nasty),),
        run={"path": nasty},
    )
    text = rendered(report, width=200)
    assert "[red]x[/red]\\x1b[31m\\r\\u202e:smile:" in text
    assert not {"\x1b", "\r", "\u202e"} & set(text)


def test_an_output_that_is_not_utf8_gets_ascii() -> None:
    report = replace(DIVERGED, findings=(replace(DIVERGENCE, message="größer als 模型"),))
    text = rendered(report, encoding="ascii")
    assert "gr\\xf6\\xdfer als \\u6a21" in text


def test_a_thousand_ranks_are_a_few_lines() -> None:
    rows = tuple(
        replace(row, host=f"node-{row.rank // 8}", device=f"cuda:{row.rank % 8}") for row in rank_rows(1024)
    )
    died = replace(rows[-1], status=RankStatus.DIED, steps=118, last_step=118, last_stage="local")
    report = make_report(world_size=1024, attempts=(AttemptSummary(0, 1024, 120, (*rows[:-1], died)),))
    text = rendered(report)
    assert (
        squeezed(text).count("1023 died at step 118, local, 0-1022 finished after 120 steps, on 128 hosts")
        == 1
    )
    text = rendered(report, detail=Detail.ALL)
    assert "0-1022" in text
    assert "128 hosts" in text
    assert "died at step 118, local" in squeezed(text)
    assert len(text.splitlines()) < 25


def test_many_ranks_share_columns_by_value() -> None:
    by_rank = {str(rank): 0.5 if rank else 0.25 for rank in range(1024)}
    evidence = {
        "elements": {
            "parameter": "w",
            "differing": 1,
            "of": 1,
            "values": [{"index": [0], "by_rank": by_rank}],
        }
    }
    text = rendered(replace(DIVERGED, findings=(replace(DIVERGENCE, evidence=evidence),)))
    header = next(line for line in text.splitlines() if line.split()[:1] == ["element"])
    assert squeezed(header) == "element rank 0 ranks 1-1023"


def test_all_different_ranks_are_cut_and_counted() -> None:
    by_rank = {str(rank): float(rank) for rank in range(64)}
    evidence = {
        "hyperparameters": [{"optimizer": 1, "group": 0, "name": "lr", "by_rank": by_rank}],
        "seeds": by_rank,
    }
    text = squeezed(
        rendered(replace(DIVERGED, findings=(replace(DIVERGENCE, evidence=evidence),)), width=120)
    )
    assert "optimizer 1, group 0, lr 0.0 1.0" in text
    assert "more ranks)" in text
    assert "56 more ranks" in text


def test_ten_findings_are_shown_and_the_rest_counted() -> None:
    findings = tuple(replace(DIVERGENCE, step=step, evidence={}) for step in range(13))
    text = rendered(make_report(verdict=Verdict.FINDINGS, findings=findings))
    assert text.count("error DDP201") == 10
    assert "and 3 more findings, all in report.json: DDP201 x3" in text


def test_errors_come_before_notes() -> None:
    note = Finding("DDP102", Severity.NOTE, "Parameters differed before the broadcast", "as usual")
    text = rendered(make_report(verdict=Verdict.FINDINGS, findings=(note, DIVERGENCE)))
    assert text.index("error DDP201") < text.index("note DDP102")


def test_attempts_each_have_a_table() -> None:
    attempts = (AttemptSummary(0, 4, 7, rank_rows(4, steps=7)), AttemptSummary(1, 3, 120, rank_rows(3)))
    text = rendered(replace(DIVERGED, attempts=attempts), detail=Detail.ALL)
    assert "Ranks, attempt 0: 4 ranks, 7 steps" in text
    assert "Ranks, attempt 1: 3 ranks, 120 steps" in text
    assert "attempt 0, step 3" in text


def shown(evidence: dict[str, Any]) -> str:
    return squeezed(
        rendered(replace(DIVERGED, findings=(replace(DIVERGENCE, evidence=evidence),)), width=120)
    )


def test_a_count_of_a_later_step_is_distinguished_from_the_values() -> None:
    elements = {"parameter": "w", "differing": 7, "of": 9, "exact": False, "step": 3}
    assert "at least 7 of 9 elements differ in w at step 3:" in shown({"elements": elements})
    later = {**elements, "counted_at_step": 5}
    assert "7 of 9 elements differ in w at step 5; values at step 3:" in shown({"elements": later})


def test_evidence_of_any_shape_reads_as_text() -> None:
    text = shown(
        {
            "parameter_order": [{"ranks": [0, 1, 2], "groups": "a,b"}, {"ranks": [3], "groups": "b,a"}],
            "names": {"rank 0": "mean", "rank 1": "std"},
            "reported": list(range(1023)),
            "details": {str(rank): "out of memory" for rank in range(64)},
            "many": [{"name": f"p{number}"} for number in range(30)],
        }
    )
    assert "parameter order: ranks 0-2; groups: a,b rank 3; groups: b,a" in text
    assert "names: rank 0: mean; rank 1: std" in text
    assert "reported: 0-1022" in text
    assert "details: ranks 0-63: out of memory" in text
    assert "name: p9 and 20 more" in text


def test_evidence_of_one_shape_is_a_table() -> None:
    links = [{"from": "a", "to": "b", "busy_pct": 86}, {"from": "b", "to": "c", "busy_pct": 9}]
    assert "links: from to busy pct a b 86 b c 9" in shown({"links": links})
    wide = [{**link, "why": "w" * 110} for link in links]
    assert "from: a; to: b; busy_pct: 86; why: ww" in shown({"links": wide})
    assert "nodes: a, b" in shown({"nodes": ["a", "b"]})


def test_tensors_that_were_not_recorded_are_not_called_equal() -> None:
    assert "5 tensors were compared; which of them differ was not recorded" in shown(
        {"parameters": {"count": 0, "of": 5, "names": []}}
    )


def test_evidence_of_another_shape_is_still_shown() -> None:
    evidence = {
        "elements": {"parameter": "w"},
        "groups": [1, 2],
        "parameters": None,
        "odd_ranks": [1, 2, 3, 9],
    }
    text = rendered(replace(DIVERGED, findings=(replace(DIVERGENCE, evidence=evidence),)))
    assert "elements: parameter: w" in text
    assert "odd ranks: 1-3, 9" in text


STANDING: dict[str, Any] = {
    "ranks": [0],
    "step": 6,
    "after": "backward_begun",
    "waits_in": "the AllReduce of a backward",
    "left": False,
    "collectives": {"0": 12},
    "stack": [
        "/env/lib/python3.11/site-packages/torch/autograd/graph.py:979 in _engine_run_backward",
        "/env/lib/python3.11/site-packages/torch/_tensor.py:623 in backward",
        "/home/me/train.py:41 in main",
        "/home/me/train.py:60 in <module>",
    ],
}
STANDINGS = [
    STANDING,
    {**STANDING, "ranks": [1, 2], "waits_in": "barrier", "stack": ["/home/me/train.py:46 in \x1b[31mmain"]},
    {**STANDING, "ranks": [3], "waits_in": None, "left": True, "stack": []},
]


def hung(standings: list[dict[str, Any]], width: int) -> str:
    finding = replace(DIVERGENCE, code="DDP603", evidence={"standings": standings})
    return rendered(make_report(verdict=Verdict.FINDINGS, findings=(finding,)), width=width)


def test_stacks_are_side_by_side() -> None:
    lines = hung(STANDINGS, 120).splitlines()
    at = next(number for number, line in enumerate(lines) if "Stacks, innermost call first" in line)
    assert lines[at + 1].split() == ["rank", "0", "ranks", "1-2", "rank", "3"]
    assert "waits in barrier" in lines[at + 3]
    assert "has exited" in lines[at + 3]
    # The user's own lines stay; libraries between them are counted.
    assert lines[at + 4].startswith("    graph.py:979 in _engine_run_backward")
    assert "train.py:46 in \\x1b[31mmain" in lines[at + 4]
    assert [line.strip() for line in lines[at + 5 : at + 8]] == [
        "(1 in libraries)",
        "train.py:41 in main",
        "train.py:60 in <module>",
    ]


def test_stacks_are_below_each_other_on_a_narrow_terminal() -> None:
    lines = hung(STANDINGS, 60).splitlines()
    assert any(line.split() == ["rank", "0", "ranks", "1-2"] for line in lines)
    assert any(line.split() == ["rank", "3"] for line in lines)
    assert max(map(cell_len, lines)) <= 60


def test_a_thousand_stacks_are_cut() -> None:
    text = hung([{**STANDING, "ranks": [rank]} for rank in range(1000)], 100)
    assert "and 992 more stacks, in report.json" in text
