"""The corpus' tables: every miss is shown, counted and makes it fail."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from tests.corpus import document, table
from tests.corpus.header import NOTHING, Header
from tests.corpus.jobs import Job, Outcome
from tests.corpus.plain import PlainResult
from tests.corpus.results import Program, Results, Row
from tests.corpus.run import FAULTS, HEALTHY, ROOT, VARIANTS, collect
from tests.corpus.verdict import Verdict

FAULT = Header(
    path=Path("examples/faults/bypass.py"),
    title="",
    expect="DDP202",
    ranks=(2,),
    bugs=(1,),
    seen_in="minimind#853",
    cause="wrapper | bypassed",
    step=2,
    outliers=(0, 1),
)
SOUND = Header(
    path=Path("examples/healthy/plain.py"), title="", expect=NOTHING, ranks=(1, 2), cases=("a", "b")
)


def right(header: Header, found: tuple[str, ...]) -> Verdict:
    return Verdict(Outcome(Job(header, 2)), found, True, True, True, True, ())


def wrong(header: Header, found: tuple[str, ...], miss: str) -> Verdict:
    return replace(right(header, found), step=False, misses=(miss,))


GOOD = Results(
    faults=(
        Row(
            FAULT,
            (right(FAULT, ("DDP202",)),),
            PlainResult("nothing"),
            PlainResult("a warning", "UserWarning: hm"),
        ),
    ),
    variants=(Row(replace(FAULT, variant_of="bypass"), (right(FAULT, ("DDP202",)),)),),
    healthy=(Row(SOUND, (right(SOUND, ()),) * 4),),
    programs=(Program("accelerate", 5, 5, "five scripts"),),
)


def shown(results: Results) -> str:
    sink = io.StringIO()
    table.show(results, Console(file=sink, width=200))
    return sink.getvalue()


def test_all_is_well() -> None:
    assert GOOD.passed
    assert GOOD.totals() == [
        "faults: 1 of 1 right (code 1, cause 1, step 1, rank 1)",
        "variants of faults: 1 of 1 right (code 1, cause 1, step 1, rank 1)",
        "healthy: 4 of 4 jobs as expected (2 variants), 0 findings at warning or above",
        "PyTorch by itself: nothing for 1",
        "with TORCH_DISTRIBUTED_DEBUG=INFO: a warning for 1",
        "run again after torch failed at its own exit: none",
        "accelerate: 5 of 5",
    ]
    assert "NO" not in shown(GOOD)


def test_one_wrong_time_of_three_is_a_miss() -> None:
    verdicts = (
        right(FAULT, ("DDP202",)),
        wrong(FAULT, ("DDP201",), "step: expected 2, found 3"),
        right(FAULT, ("DDP202",)),
    )
    results = replace(GOOD, faults=(Row(FAULT, verdicts),))
    assert not results.passed
    assert results.totals()[0] == "faults: 0 of 1 right (code 1, cause 1, step 0, rank 1)"
    text = shown(results)
    assert "faults/bypass x2: step: expected 2, found 3" in text
    assert "DDP202 / DDP201" in text
    assert "Not as expected" in document.render(results)


def test_a_false_alarm_is_counted() -> None:
    alarm = wrong(SOUND, ("DDP306",), "DDP306: the same numbers")
    results = replace(GOOD, healthy=(Row(SOUND, (alarm, right(SOUND, ()))),))
    assert not results.passed
    assert results.false_alarms == 1
    assert "1 of 2 jobs as expected (2 variants), 1 findings at warning or above" in results.totals()[2]


def test_jobs_that_were_run_again_are_told_of() -> None:
    again = right(FAULT, ("DDP202",))
    again = replace(again, outcome=replace(again.outcome, retried=2))
    results = replace(GOOD, faults=(Row(FAULT, (again, right(FAULT, ("DDP202",)))),))
    reruns = "run again after torch failed at its own exit: faults/bypass x2 2"
    assert reruns in results.totals()
    assert reruns in shown(results)
    assert f"- {reruns}" in document.render(results).splitlines()


def test_a_script_that_was_not_run_is_not_right() -> None:
    assert not replace(GOOD, faults=(Row(FAULT, ()),)).passed


def test_a_program_that_went_otherwise() -> None:
    results = replace(GOOD, programs=(Program("accelerate", 4, 5, "one differs"),))
    assert not results.passed
    assert table.misses(results) == ["accelerate: 4 of 5 one differs"]


def test_the_page() -> None:
    page = document.render(GOOD)
    assert page.startswith("<!-- Made by `make corpus`.")
    row = (
        "| 1 | minimind#853 | [bypass](../examples/faults/bypass.py) | "
        "DDP202: wrapper \\| bypassed, step 2, ranks 0 1 | DDP202 | yes | yes | yes | yes | nothing | a warning |"
    )
    assert row in page.splitlines()
    assert "- `bypass` with INFO: a warning, “UserWarning: hm”" in page
    assert "| [plain](../examples/healthy/plain.py) | a b | 1 2 | 4 | nothing |" in page
    assert "| accelerate | 5 of 5 | five scripts |" in page
    assert "Real programs" not in document.render(replace(GOOD, programs=None))


def test_the_page_of_the_project_names_every_script() -> None:
    """Where this fails, a script is new or gone: `make corpus` writes the page anew."""
    page = (ROOT / "docs" / "corpus.md").read_text(encoding="utf-8")
    scripts = [header.path for folder in (FAULTS, VARIANTS, HEALTHY) for header in collect(ROOT / folder)]
    linked = set(re.findall(r"\(\.\./(examples/[\w/]+\.py)\)", page))
    assert linked == {str(path.relative_to(ROOT)) for path in scripts}


def test_rows_are_replaced_added_and_removed() -> None:
    page = document.render(GOOD)
    added = replace(FAULT, path=Path("examples/faults/another.py"), bugs=(7,))
    rows = Results((Row(added, (right(added, ("DDP202",)),)),), (), ())
    updated = document.update(page, rows, [FAULT.path, added.path])
    assert updated.count("another.py") == 1
    assert updated.index("faults/bypass.py") < updated.index("another.py") < updated.index("## Variants")
    # Of a healthy script that is gone; everything else stays.
    assert "plain.py" in page
    assert "plain.py" not in updated
    again = document.update(updated, rows, [FAULT.path, added.path])
    assert again == updated
    missed = Results((Row(added, (wrong(added, ("DDP203",), "step"),)),), (), ())
    assert "DDP203" in document.update(updated, missed, [FAULT.path, added.path])
