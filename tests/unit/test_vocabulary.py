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
    r"replicas part(ed)?|where they part|had their say|none of (their|its|our) business|watcher of the day|"
    r"nobody('s)?|said|told|heard|hears|spoken|looked at|lies in(side)?|the most of|stands (in|for|out|between)|"
    r"dealt out|held down|have to send|odd ones?|a second over time|gave (all|no|so|the))\b",
    re.IGNORECASE,
)
TEXTS = ("README.md", "CONTRIBUTING.md", "docs", "ddpcheck", "probes", "reports", "examples")
ENDINGS = ("*.py", "*.md", "*.schema.json")
# Names of variables, arguments, functions and classes. Fields are exempt: some are part of stored formats.
NAMES = {"said", "says", "told", "tell", "heard", "place", "places", "odd", "gave"}


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


def texts() -> Iterator[Path]:
    for name in TEXTS:
        top = ROOT / name
        yield from [top] if top.is_file() else (path for end in ENDINGS for path in sorted(top.rglob(end)))


def test_texts_use_the_words_of_the_field() -> None:
    dialect = []
    for path in texts():
        # Written by a whole `make corpus` from results and from the headers of that time.
        if path == ROOT / "docs" / "corpus.md":
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            # Quoted names are exempt.
            if DIALECT.search(re.sub(r"`[^`]*`", "", line)):
                dialect.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert dialect == []


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Names that a module assigns or defines, without the fields of its classes."""
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = {id(line.target) for each in classes for line in each.body if isinstance(line, ast.AnnAssign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            yield node.lineno, node.id
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.lineno, node.name


def test_names_use_the_words_of_the_field() -> None:
    dialect = []
    for path in sources():
        tree = ast.parse(path.read_text())
        dialect += [
            f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in names(tree) if name == "found"
        ]
    for path in [
        *sources(),
        *sorted((ROOT / "tests").rglob("*.py")),
        *sorted((ROOT / "examples").rglob("*.py")),
    ]:
        relative = path.relative_to(ROOT).as_posix()
        tree = ast.parse(path.read_text())
        dialect += [f"{relative}:{line}: {name}" for line, name in names(tree) if name in NAMES]
    assert dialect == []
