"""docs/architecture.md draws the folders that are really there."""

from __future__ import annotations

import re

from tests.helpers.paths import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()


def drawn() -> set[str]:
    tree = PAGE[PAGE.index("    ddpcheck/  ") : PAGE.index("| layer |")]
    folders: set[str] = set()
    parents: list[str] = []
    for line in tree.splitlines():
        entry = re.match(r"^ {4}( *)([a-z_]+)/", line)
        if entry:
            depth = len(entry[1]) // 2
            parents = [*parents[:depth], entry[2]]
            folders.add("/".join(parents))
    return folders


def real() -> set[str]:
    sources = [path for room in ("ddpcheck", "probes", "reports") for path in (ROOT / room).rglob("*.py")]
    folders = {path.parent.relative_to(ROOT) for path in sources}
    return {
        str(folder)
        for folder in folders
        if not str(folder).startswith(("ddpcheck/probes", "ddpcheck/reports"))
    }


def test_the_tree_shows_every_folder_and_no_other() -> None:
    assert drawn() == real()


def test_no_flat_folder_of_more_than_25_modules() -> None:
    for folder in real():
        assert len(list((ROOT / folder).glob("*.py"))) <= 26, folder
