"""The commands of ddpcheck, listed in one place."""

from __future__ import annotations

from typing import Annotated

import typer

from ddpcheck.cli.diff import diff
from ddpcheck.cli.doctor import doctor
from ddpcheck.cli.explain import explain
from ddpcheck.cli.links import links
from ddpcheck.cli.list import list_runs
from ddpcheck.cli.merge import merge
from ddpcheck.cli.report import report
from ddpcheck.cli.report_options import WithPage
from ddpcheck.cli.run import run
from ddpcheck.cli.trace import trace
from ddpcheck.cli.view import view
from ddpcheck.cli.watch import watch
from ddpcheck.version import VERSION

# Plain help and plain errors: they start quicker, and read the same in a log as on a terminal.
app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ddpcheck {VERSION}")
        raise typer.Exit


@app.callback()
def ddpcheck(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Watch any PyTorch DDP job, unchanged, and prove that its replicas agree or name where they part."""


# Whatever follows the command's first word belongs to the command, dashes and all.
app.command(cls=WithPage, context_settings={"allow_interspersed_args": False})(run)
app.command(cls=WithPage)(report)
app.command()(watch)
app.command(name="list")(list_runs)
app.command()(diff)
app.command()(trace)
app.command()(merge)
app.command(context_settings={"allow_interspersed_args": False})(links)
app.command()(view)
app.command(context_settings={"allow_interspersed_args": False})(doctor)
app.command()(explain)
