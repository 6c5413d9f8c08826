"""The table of cases: titles and results from pytest's file."""

from __future__ import annotations

from pathlib import Path

from tests.schedulers.document import BEGIN, END, PAGE, Outcome, read_outcomes, update

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.schedulers.slurm_cases" name="test_one">
<properties><property name="case" value="scancel"/></properties></testcase>
<testcase classname="tests.schedulers.ray_cases" name="test_two"><failure message="x"/></testcase>
<testcase classname="tests.schedulers.ray_cases" name="test_three"><skipped message="Ray is not installed"/></testcase>
</testsuite></testsuites>
"""


def test_outcomes(tmp_path: Path) -> None:
    path = tmp_path / "results.xml"
    assert read_outcomes(path) == []
    path.write_text(JUNIT)
    assert read_outcomes(path) == [
        Outcome("Slurm", "scancel", "as expected"),
        Outcome("Ray", "test_two", "**not as expected**"),
        Outcome("Ray", "test_three", "not run: Ray is not installed"),
    ]


def test_later_results_replace_earlier_ones() -> None:
    page = update(f"A\n{BEGIN}\n{END}\nB\n", [Outcome("Ray", "one", "as expected")])
    page = update(
        page, [Outcome("Slurm", "two", "as expected"), Outcome("Ray", "one", "**not as expected**")]
    )
    assert [line for line in page.splitlines() if line.startswith(("| Ray", "| Slurm"))] == [
        "| Slurm | two | as expected |",
        "| Ray | one | **not as expected** |",
    ]
    assert (page.startswith("A\n"), page.endswith("\nB\n")) == (True, True)


def test_the_page_has_a_place_for_the_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1
