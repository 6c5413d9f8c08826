"""`ddpcheck explain`: the meaning of a finding and how to fix it."""

from __future__ import annotations

import difflib
import sys
from typing import Annotated

import typer

from ddpcheck import explanations
from ddpcheck.errors import UsageError


def explain(
    code: Annotated[str | None, typer.Argument(metavar="[CODE]", help="For example DDP201.")] = None,
) -> None:
    """Explain a finding. Without a code, list all codes.

    \b
    Examples:
      ddpcheck explain
      ddpcheck explain DDP201
    """
    if code is None:
        for each in explanations.codes():
            typer.echo(f"{each}  {explanations.title(each)}")
        return
    _show(explanations.page(_known(code)))


def _known(code: str) -> str:
    wanted = code.strip().upper()
    known = explanations.codes()
    if wanted in known:
        return wanted
    nearest = sorted(difflib.get_close_matches(wanted, known, n=3, cutoff=0.5))
    hint = f"did you mean {', '.join(nearest)}?" if nearest else "`ddpcheck explain` lists all codes"
    raise UsageError(f"there is no finding {code!r}: {hint}")


def _show(page: str) -> None:
    if not sys.stdout.isatty():
        typer.echo(page, nl=False)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    Console().print(Markdown(page))
