"""The options for further reports, the same for `run` and `report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from ddpcheck.errors import UsageError

Html = Annotated[
    str | None,
    typer.Option(
        "--html",
        metavar="[FILE]",
        help="Make a page for a browser: FILE (which must end in .html), or report.html in the run folder.",
        show_default=False,
    ),
]
Junit = Annotated[
    Path | None,
    typer.Option("--junit", metavar="FILE", help="Write JUnit XML for a CI system.", show_default=False),
]
Markdown = Annotated[
    Path | None,
    typer.Option("--markdown", metavar="FILE", help="Write the report in Markdown.", show_default=False),
]
Github = Annotated[
    bool,
    typer.Option("--github", help="Make annotations and a job summary, in a job of GitHub Actions."),
]
Tensorboard = Annotated[
    bool,
    typer.Option("--tensorboard", help="Make a folder for TensorBoard, which `ddpcheck view` shows."),
]


class WithPage(TyperCommand):
    """A command with `--html [FILE]`: click has no option whose value may be left out before an argument."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, spelled_out(args))


def spelled_out(arguments: list[str]) -> list[str]:
    """A bare `--html` gets an empty value, unless a name that ends in .html follows it."""
    words: list[str] = []
    for place, word in enumerate(arguments):
        # What follows belongs to the job.
        if word == "--":
            return words + arguments[place:]
        following = arguments[place + 1] if place + 1 < len(arguments) else ""
        words.append("--html=" if word == "--html" and not following.endswith(".html") else word)
    return words


def shown_by(run: Path, out: Path | None) -> str:
    """The command that shows what was written for TensorBoard."""
    if out is None:
        return f"`ddpcheck view {run}` shows it in TensorBoard."
    return f"`tensorboard --logdir {out}` shows it."


def checked_output(option: str, path: Path | None) -> Path | None:
    """Said before the job starts, not after hours of it."""
    if path is None:
        return None
    if path.is_dir():
        raise UsageError(f"{option} {path}: this is a folder, and a file is to be written")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"{option} {path}: there is no folder {path.parent}; make it first")
    return path


def checked_page(html: str | None) -> str | None:
    if html:
        if not html.endswith(".html"):
            raise UsageError(f"--html {html}: the name must end in .html")
        checked_output("--html", Path(html))
    return html
