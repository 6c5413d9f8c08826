"""Where a file of the repository stands on the site, and its links as the site needs them."""

from __future__ import annotations

import posixpath
import re
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
EXPLANATIONS = "ddpcheck/explanations"
EXAMPLES = "examples"
_AT_THE_TOP = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_SOURCES = {".py": "python", ".sh": "bash"}
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def page_of(path: str) -> str | None:
    """The page that shows a file, by both their paths; None where there is none."""
    place = PurePosixPath(path)
    if path in _AT_THE_TOP:
        return _AT_THE_TOP[path]
    if str(place.parent) == EXPLANATIONS and place.suffix == ".md":
        return f"findings/{place.name}"
    if place.parts[0] == EXAMPLES and place.suffix in _SOURCES:
        return f"source/{path}.md"
    return path.removeprefix("docs/") if place.parts[0] == "docs" else None


@cache
def pages_from_elsewhere() -> dict[str, str]:
    """Pages whose text stands outside docs/, and the files that hold it."""
    found = [
        *_AT_THE_TOP,
        *_below(EXPLANATIONS, "*.md"),
        *(path for suffix in _SOURCES for path in _below(EXAMPLES, f"*{suffix}")),
    ]
    return {page: path for path in found if (page := page_of(path))}


def text_of(path: str) -> str:
    """What the page of a file is made of: a program is shown as one, and not searched."""
    text = (ROOT / path).read_text(encoding="utf-8")
    language = _SOURCES.get(PurePosixPath(path).suffix)
    if language is None:
        return text
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n``````{language}\n{text.rstrip()}\n``````\n"


def with_links(text: str, path: str) -> str:
    """Links from one file to another become links between their pages; others are left as they are."""
    page = page_of(path) or path

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), found[2]))
        # What only looks like a link, as in a line of code, leads to no file.
        moved = page_of(target) if (ROOT / target).is_file() else None
        if moved is None:
            return found[0]
        return f"{found[1]}{posixpath.relpath(moved, posixpath.dirname(page) or '.')}{found[3]}"

    return _LINK.sub(link, text)


def _below(folder: str, pattern: str) -> list[str]:
    return sorted(found.relative_to(ROOT).as_posix() for found in (ROOT / folder).rglob(pattern))
