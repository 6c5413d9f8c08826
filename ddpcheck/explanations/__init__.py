"""One page per finding: what it means, how ddpcheck tells, what could fool it, how to fix it."""

from __future__ import annotations

from functools import cache
from importlib.resources import files


@cache
def codes() -> tuple[str, ...]:
    """All codes that have a page, in order."""
    names = (item.name for item in files(__name__).iterdir())
    return tuple(sorted(name.removesuffix(".md") for name in names if name.endswith(".md")))


def page(code: str) -> str:
    """The page of `code`, in Markdown; KeyError where there is none."""
    if code not in codes():
        raise KeyError(code)
    return (files(__name__) / f"{code}.md").read_text(encoding="utf-8")


def title(code: str) -> str:
    """What the page of `code` is headed with, without the code."""
    return page(code).partition("\n")[0].removeprefix(f"# {code}: ")
