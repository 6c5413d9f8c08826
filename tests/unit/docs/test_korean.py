"""The Korean pages are kept in step with the English ones: headings, commands, output, tables, pictures and links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

DOCS = ROOT / "docs"
PAGES = {
    "README.md": ROOT / "README.md",
    "getting-started.md": DOCS / "getting-started.md",
    "walkthrough.md": DOCS / "walkthrough.md",
}


def headings(text: str) -> list[int]:
    """The levels of all headings."""
    outside = re.sub(r"^```.*?^```$", "", text, flags=re.S | re.M)
    return [len(marks) for marks in re.findall(r"^(#+) ", outside, re.M)]


def code(text: str) -> list[str]:
    """All commands and output."""
    return re.findall(r"(?s:^```.*?^```$)|^    \S.*$", text, re.M)


def rows(text: str) -> list[int]:
    """The number of rows of each table."""
    return [len(table.splitlines()) for table in re.findall(r"(?:^\|.*\n)+", text, re.M)]


def targets(text: str, folder: Path) -> list[Path]:
    """The files that pictures and links lead to, without the link to the other language."""
    found = re.findall(r"\]\(([^)#]+)", text)
    # The site has README.md and CONTRIBUTING.md under other names.
    names = {DOCS / "index.md": ROOT / "README.md", DOCS / "contributing.md": ROOT / "CONTRIBUTING.md"}
    paths = [(folder / target).resolve() for target in found if "://" not in target]
    there = [names.get(path, path) for path in paths]
    korean = {(DOCS / "ko" / name): english for name, english in PAGES.items()}
    same = [korean.get(path, path) for path in there]
    return sorted(path for path in same if path != ROOT / "README.md")


@pytest.mark.parametrize("name", PAGES)
def test_a_translation_is_in_step(name: str) -> None:
    english, korean = PAGES[name].read_text(), (DOCS / "ko" / name).read_text()
    assert headings(korean) == headings(english)
    assert code(korean) == code(english)
    assert rows(korean) == rows(english)
    assert targets(korean, DOCS / "ko") == targets(english, PAGES[name].parent)


def test_the_cost_is_quoted_alike() -> None:
    quoted = [
        path.read_text().partition("<!-- cost table: begin")[2].partition("<!-- cost table: end")[0]
        for path in (PAGES["README.md"], DOCS / "ko" / "README.md")
    ]
    assert quoted[0] == quoted[1] != ""
