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
    """Explain a finding. Without a code, list all codes; with the beginning of codes, list these.

    \b
    Examples:
      ddpcheck explain
      ddpcheck explain DDP201
      ddpcheck explain 2                (all DDP2xx)
    """
    if code is None:
        for each in explanations.codes():
            typer.echo(f"{each}  {explanations.title(each)}")
        return
    matching = _matching(code)
    if len(matching) == 1:
        _show(explanations.page(matching[0]))
        return
    for each in matching:
        typer.echo(f"{each}  {explanations.title(each)}")


def _matching(code: str) -> list[str]:
    """The code, also without its letters, or all codes that begin with it."""
    wanted = code.strip().upper()
    wanted = f"DDP{wanted}" if wanted.isdecimal() else wanted
    known = explanations.codes()
    if wanted in known:
        return [wanted]
    beginning = [each for each in known if each.startswith(wanted)] if wanted.startswith("DDP") else []
    if beginning:
        return beginning
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
