"""`ddpcheck links`: measure all links between the nodes of a job and find slow ones."""

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
            metavar="LAUNCHER", help="The launcher of your ranks, without a script, after two dashes."
        ),
    ] = None,
    sizes: Annotated[str, typer.Option(help="Message sizes in bytes.", metavar="LIST")] = DEFAULT_SIZES,
    seconds: Annotated[float, typer.Option(help="Measure each pair for N seconds.", metavar="N")] = 2.0,
    tolerance: Annotated[
        float,
        typer.Option(help="Report links that are N times slower than others of their class.", metavar="N"),
    ] = 1.5,
    out: Annotated[Path, typer.Option(help="Write the measurements as JSON.", metavar="FILE")] = Path(
        "links.json"
    ),
    backend: Annotated[
        str,
        typer.Option(
            help="Backend of torch.distributed, such as gloo or nccl [default: nccl if there are GPUs].",
            metavar="NAME",
        ),
    ] = "",
) -> None:
    """Measure the links between all nodes, and between the ranks of a node.

    Run it on every node, as you would run the job. Exit status: 10 if a link
    is more than --tolerance times slower than its class, the status of the
    launcher if it fails, 0 otherwise.

    \b
    Examples:
      ddpcheck links -- torchrun --nnodes 4 --rdzv-backend c10d --rdzv-endpoint host:29400
      ddpcheck links -- srun
    """
    if not command:
        raise UsageError(f"no launcher given; put it after two dashes, for example `{_EXAMPLE}`")
    try:
        arguments = as_arguments(parse_sizes(sizes), check_seconds(seconds), check_tolerance(tolerance))
    except ValueError as error:
        raise UsageError(str(error)) from None
    from ddpcheck.launcher.rank_tools import measure_links

    raise typer.Exit(measure_links(command, arguments, out.absolute(), backend))
