"""The table of versions: one row for each, replaced by later results."""

from __future__ import annotations

from tests.compat.document import BEGIN, END, PAGE, update
from tests.compat.results import Results

RIGHT = {"jobs": 2, "passed": 2, "skipped": "", "misses": []}
WRONG = {"jobs": 2, "passed": 1, "skipped": "", "misses": ["step: expected 2, found 3"]}
SKIPPED = {"jobs": 0, "passed": 0, "skipped": "needs torch 2.8", "misses": []}

PAGE_BEFORE = f"""# Versions

{BEGIN}
| 2.4.1 | 3.11.7 | 1 of 2 | - | - | - | - |
{END}

After.
"""


def test_a_row_replaces_the_one_of_its_version() -> None:
    results = Results("2.10.0", "3.13.1")
    results = results.with_corpus({"faults": {"a": RIGHT, "b": WRONG, "c": SKIPPED}})
    results = results.with_corpus({"healthy": {"d": RIGHT, "e": WRONG}})
    results = results.with_tests(
        "identity", {"one": "passed", "two": "passed without x y", "three": "failed: z"}
    )
    page = update(PAGE_BEFORE, results)
    rows = [line for line in page.splitlines() if line.startswith("| 2.")]
    assert rows == [
        "| 2.10.0 | 3.13.1 | 1 of 2, 1 not run | - | 3 of 4 | 2 of 3 | - |",
        "| 2.4.1 | 3.11.7 | 1 of 2 | - | - | - | - |",
    ]
    # Later results replace those of the same scripts.
    page = update(page, results.with_corpus({"faults": {"b": RIGHT}}))
    assert "| 2.10.0 | 3.13.1 | 2 of 2, 1 not run |" in page
    assert page.count("| 2.10.0 |") == 1
    assert page.endswith("\nAfter.\n")


def test_misses_and_what_was_left_out() -> None:
    results = Results("2.10.0", "3.13.1").with_corpus({"faults": {"b": WRONG}})
    results = results.with_tests("identity", {"two": "passed without x y", "three": "failed: z"})
    assert results.misses() == ["faults/b: step: expected 2, found 3", "three: failed: z"]
    assert results.left_out() == ["x", "y"]


def test_the_page_has_a_place_for_rows() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page.count(BEGIN) == page.count(END) == 1
