"""`ddpcheck selftest`: check ddpcheck itself on this machine, above all on one with GPUs."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from ddpcheck.errors import UsageError

_MOST_RANKS = 64


def selftest(
    json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Also write the page to FILE, as plain text.", metavar="FILE", show_default=False),
    ] = None,
    ranks: Annotated[
        int,
        typer.Option(
            help="Ranks of the job [default: one per device, 2 without devices].",
            metavar="N",
            show_default=False,
        ),
    ] = 0,
    blocks: Annotated[int, typer.Option(help="Blocks of steps to measure.", metavar="N")] = 6,
    steps: Annotated[int, typer.Option(help="Steps of a block.", metavar="N")] = 24,
    keep: Annotated[
        Path | None,
        typer.Option(help="Keep the folders of both jobs in DIR.", metavar="DIR", show_default=False),
    ] = None,
) -> None:
    """Check ddpcheck itself on this machine, and print one page to send back.

    Compares the kernels that read tensors with operators of torch, over
    dtypes, sizes and alignments; trains a small DDP job with and without
    ddpcheck and compares the final weights bit for bit; measures both in
    turns. On a machine without GPUs everything runs on the CPU, and the page
    says so.

    Exit status: 0 if everything agrees, 10 if something does not.

    \b
    Examples:
      ddpcheck selftest
      ddpcheck selftest --out selftest.txt
      ddpcheck selftest --ranks 8 --blocks 20 --steps 100
    """
    if not 0 <= ranks <= _MOST_RANKS or ranks == 1:
        raise UsageError(f"--ranks {ranks}: give 2 to {_MOST_RANKS} ranks")
    if blocks < 1 or steps < 1:
        raise UsageError("--blocks and --steps: give at least 1")
    from rich.console import Console

    from ddpcheck.reports.terminal.selftest import progress_on, render
    from ddpcheck.selftest.model import as_text
    from ddpcheck.selftest.run import SelftestOptions, run_selftest

    with tempfile.TemporaryDirectory(prefix="ddpcheck-selftest-") as temporary:
        folder = Path(temporary) if keep is None else keep.absolute()
        options = SelftestOptions(folder, blocks, steps, ranks)
        with progress_on(Console(stderr=True)) as progress:
            report = run_selftest(options, progress)
    if out is not None:
        try:
            out.write_text(as_text(report))
        except OSError as error:
            raise UsageError(f"cannot write {out}: {error.strerror}") from error
    if json:
        typer.echo(report.to_json(), nl=False)
    else:
        render(report, Console())
    if report.status:
        raise typer.Exit(report.status)
