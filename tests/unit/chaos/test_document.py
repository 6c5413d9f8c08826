"""The tables of docs/reliability.md."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.campaign import Outcome
from tests.chaos.document import files_table, jobs_table, kinds_of, write_page
from tests.chaos.faults import FAULTS

JOBS = [
    Outcome(0, "rank-killed", 0),
    Outcome(1, "rank-killed", 1, wrong=["no report: x"]),
    Outcome(2, "quota", 2, void="no fault: the job ended before step 40"),
]
HOW = "sound: rank-00001.jsonl: values; traces/vm.pt.trace.json.gz: cut (report --json: 0; merge: 1)"


def rows(table: str) -> dict[str, list[str]]:
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if "|" in line
    ]
    return {row[0]: row[1:] for row in cells}


def test_jobs_are_counted_by_fault() -> None:
    table = jobs_table(JOBS)
    assert rows(table)["SIGKILL of a rank"][1:] == ["2", "1", "0"]
    assert rows(table)["quota exceeded (EDQUOT)"][1:] == ["1", "0", "1"]
    assert rows(table)["all"][1:] == ["3", "1", "1"]
    assert "rank-killed, seed 1: no report: x" in table


def test_examples_are_counted_by_the_files_they_damage() -> None:
    assert kinds_of(HOW) == {"record files of ranks", "profiler traces"}
    table = rows(files_table([Outcome(0, HOW, 0), Outcome(0, "sound: run.json: cut (diff: 0)", 0)]))
    assert table["record files of ranks"] == ["1", "1"]
    assert table["run.json"] == ["1", "1"]
    assert table["all examples (one may damage several files)"] == ["2", "2"]


def test_only_the_tables_of_a_page_change(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    source = Path(__file__).parents[3] / "docs" / "reliability.md"
    page.write_text(source.read_text())
    write_page(page, JOBS, [], 5)
    text = page.read_text()
    assert "First seed: 5." in text
    assert text.split("<!-- /jobs -->")[1] == source.read_text().split("<!-- /jobs -->")[1]
    write_page(page, JOBS, [], 5)
    assert page.read_text() == text


def test_names_of_faults_are_unique() -> None:
    assert len({fault.name for fault in FAULTS}) == len({fault.what for fault in FAULTS}) == len(FAULTS)
