"""`ddpcheck links`: measure every link of a job's nodes, and name the slow one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ddpcheck.errors import UsageError
from ddpcheck.links.options import DEFAULT_SIZES, as_arguments, check_seconds, check_tolerance, parse_sizes

_EXAMPLE = "ddpcheck links -- torchrun --nnodes 2 --nproc-per-node 4 ..."


def links(
    command: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="LAUNCHER", help="What starts your ranks, without a script, after two dashes."
        ),
    ] = None,
    sizes: Annotated[str, typer.Option(help="Bytes of the messages.", metavar="LIST")] = DEFAULT_SIZES,
    seconds: Annotated[float, typer.Option(help="For each pair.")] = 2.0,
    tolerance: Annotated[
        float, typer.Option(help="How many times slower than its class a link may be.")
    ] = 1.5,
    out: Annotated[Path, typer.Option(help="What was measured, for programs.", metavar="FILE")] = Path(
        "links.json"
    ),
    backend: Annotated[str, typer.Option(help="gloo or nccl [default: nccl where there are GPUs].")] = "",
) -> None:
    """Measure the links between all nodes, and between ranks within a node.

    Start it on every node as you would start the job. Exit status: 10 where a
    link is slower than --tolerance times its class, the launcher's own where
    it failed, else 0.

    \b
    Examples:
      ddpcheck links -- torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint host:29400
      ddpcheck links -- srun
    """
    if not command:
        raise UsageError(f"there is no launcher: put it after two dashes, as in `{_EXAMPLE}`")
    try:
        arguments = as_arguments(parse_sizes(sizes), check_seconds(seconds), check_tolerance(tolerance))
    except ValueError as error:
        raise UsageError(str(error)) from None
    from ddpcheck.launcher.rank_tools import measure_links

    raise typer.Exit(measure_links(command, arguments, out.absolute(), backend))
