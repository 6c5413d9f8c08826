"""The command line: registers every command."""

from __future__ import annotations

from typing import Annotated

import typer

from ddpcheck.cli.collect import collect
from ddpcheck.cli.diff import diff
from ddpcheck.cli.doctor import doctor
from ddpcheck.cli.env import env
from ddpcheck.cli.explain import explain
from ddpcheck.cli.links import links
from ddpcheck.cli.list import list_runs
from ddpcheck.cli.merge import merge
from ddpcheck.cli.options import OptionalHtmlCommand
from ddpcheck.cli.records import records
from ddpcheck.cli.report import report
from ddpcheck.cli.run import run
from ddpcheck.cli.selftest import selftest
from ddpcheck.cli.trace import trace
from ddpcheck.cli.view import view
from ddpcheck.cli.watch import watch
from ddpcheck.version import VERSION

# Plain help and errors: they start faster, and look the same in a log as on a terminal.
app = typer.Typer(
    add_completion=True,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(f"ddpcheck {VERSION}")
        raise typer.Exit


@app.callback()
def ddpcheck(
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Watches PyTorch DDP jobs and proves that their replicas agree, or pinpoints where they diverge.

    \b
    Examples:
      ddpcheck run -- torchrun --nproc-per-node 4 train.py
      ddpcheck report
      ddpcheck explain DDP201
    """


# All words after the first word of the user's command belong to that command, including options.
app.command(cls=OptionalHtmlCommand, context_settings={"allow_interspersed_args": False})(run)
app.command(cls=OptionalHtmlCommand)(report)
app.command()(watch)
app.command(name="list")(list_runs)
app.command()(diff)
app.command()(trace)
app.command()(merge)
app.command()(records)
app.command()(env)
app.command(cls=OptionalHtmlCommand)(collect)
app.command(context_settings={"allow_interspersed_args": False})(links)
app.command()(view)
app.command(context_settings={"allow_interspersed_args": False})(doctor)
app.command()(selftest)
app.command()(explain)
