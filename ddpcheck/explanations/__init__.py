"""One page per finding: what it means, how ddpcheck detects it, what could fool it, how to fix it."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def codes() -> tuple[str, ...]:
    """All codes that have a page, sorted."""
    return tuple(sorted(_pages()))


def page(code: str) -> str:
    """The page of `code`, in Markdown; KeyError if there is none."""
    return _pages()[code].read_text(encoding="utf-8")


def title(code: str) -> str:
    """The heading of the page of `code`, without the code."""
    return page(code).partition("\n")[0].removeprefix(f"# {code}: ")


@cache
def _pages() -> dict[str, Path]:
    return {file.stem: file for folder in __path__ for file in Path(folder).glob("*.md")}
