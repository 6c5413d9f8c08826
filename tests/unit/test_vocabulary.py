"""One name means one concept, and names and texts use the words of the field."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.helpers.paths import ROOT

# Words that an earlier version of the project used for something that the field has a word for.
DIALECT = re.compile(
    r"\b(glimpses?|whereabouts|roll[ _]call|so[- ]manieth|ledger|courier|sieve|vigil|tidings|who holds|"
    r"replicas part(ed)?|had their say|none of (their|its|our) business|watcher of the day|nobody's)\b",
    re.IGNORECASE,
)
TEXTS = ("README.md", "CONTRIBUTING.md", "docs", "ddpcheck", "probes", "reports")


def sources() -> Iterator[Path]:
    for room in ("ddpcheck", "probes", "reports"):
        for path in sorted((ROOT / room).rglob("*.py")):
            if not path.is_relative_to(ROOT / "ddpcheck" / "probes") and not path.is_relative_to(
                ROOT / "ddpcheck" / "reports"
            ):
                yield path


def test_no_class_name_is_defined_twice() -> None:
    defined: dict[str, set[Path]] = defaultdict(set)
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                defined[node.name].add(path.relative_to(ROOT))
    assert {name: paths for name, paths in defined.items() if len(paths) > 1} == {}


def test_texts_use_the_words_of_the_field() -> None:
    found = []
    for name in TEXTS:
        top = ROOT / name
        for path in [top] if top.is_file() else sorted([*top.rglob("*.py"), *top.rglob("*.md")]):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                if DIALECT.search(line):
                    found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []
