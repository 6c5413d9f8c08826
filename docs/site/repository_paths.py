"""Maps files of the repository to pages of the site, and rewrites links between them."""

from __future__ import annotations

import posixpath
import re
from functools import cache
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
EXPLANATIONS = "ddpcheck/explanations"
EXAMPLES = "examples"
_TOP_LEVEL = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
_SOURCES = {".py": "python", ".sh": "bash"}
_LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")


def page_of(path: str) -> str | None:
    """The page that shows the file at `path`; None if no page does."""
    parsed = PurePosixPath(path)
    if path in _TOP_LEVEL:
        return _TOP_LEVEL[path]
    if str(parsed.parent) == EXPLANATIONS and parsed.suffix == ".md":
        return f"findings/{parsed.name}"
    if parsed.parts[0] == EXAMPLES and parsed.suffix in _SOURCES:
        return f"source/{path}.md"
    return path.removeprefix("docs/") if parsed.parts[0] == "docs" else None


@cache
def pages_outside_docs() -> dict[str, str]:
    """Pages whose files are outside docs/, with the path of each file."""
    paths = [
        *_TOP_LEVEL,
        *_below(EXPLANATIONS, "*.md"),
        *(path for suffix in _SOURCES for path in _below(EXAMPLES, f"*{suffix}")),
    ]
    return {page: path for path in paths if (page := page_of(path))}


def text_of(path: str) -> str:
    """The Markdown of a page. Programs are shown as code and excluded from the search."""
    text = (ROOT / path).read_text(encoding="utf-8")
    language = _SOURCES.get(PurePosixPath(path).suffix)
    if language is None:
        return text
    return f"---\nsearch:\n  exclude: true\n---\n# {path}\n\n``````{language}\n{text.rstrip()}\n``````\n"


def with_links(text: str, path: str) -> str:
    """Replace links between files by links between their pages. Other links stay unchanged."""
    page = page_of(path) or path

    def link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), match[2]))
        # Text that looks like a link, such as code, points to no file.
        moved = page_of(target) if (ROOT / target).is_file() else None
        if moved is None:
            return match[0]
        return f"{match[1]}{posixpath.relpath(moved, posixpath.dirname(page) or '.')}{match[3]}"

    return _LINK.sub(link, text)


def _below(folder: str, pattern: str) -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob(pattern))
