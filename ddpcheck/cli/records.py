"""`ddpcheck records`: what the ranks of a run wrote, as JSON lines."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from ddpcheck.cli.options import find_run
from ddpcheck.errors import UsageError
from ddpcheck.step_ranges import StepRanges, parse_steps


def records(
    run: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN]",
            help="Run folder, or the beginning of its name in ddpcheck-runs [default: latest].",
        ),
    ] = None,
    rank: Annotated[
        list[int] | None, typer.Option(metavar="N", help="Only this rank. Can be repeated.")
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option(metavar="KIND", help="Only records of this kind. Can be repeated.")
    ] = None,
    steps: Annotated[
        str, typer.Option(metavar="STEPS", help="Only records of these steps, such as 3,10:13 or 100:.")
    ] = "",
) -> None:
    """Print the records of a run, one JSON object per line.

    Records of steps are binary in the files; docs/records.md describes every
    kind. A record of several steps is printed if one of them is asked for.

    \b
    Examples:
      ddpcheck records --kind digest --steps 10:13
      ddpcheck records ddpcheck-runs/20260131-101500-train --rank 3
      ddpcheck records --kind clocks | jq .total
    """
    try:
        wanted_steps = parse_steps(steps)
    except ValueError as error:
        raise UsageError(f"--steps {steps}: {error}") from None
    _check_kinds(kind or [])
    path = find_run(run)
    bad = 0
    try:
        for line, unreadable in _lines(path, set(rank or ()), set(kind or ()), wanted_steps):
            bad += unreadable
            if line:
                sys.stdout.write(line + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # `| head` has seen enough. The interpreter must not complain about the pipe when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if bad:
        typer.echo(f"{bad} damaged or unknown records were skipped.", err=True)


def _check_kinds(kinds: list[str]) -> None:
    from ddpcheck.records.registry import record_kinds

    for kind in kinds:
        if kind not in record_kinds():
            raise UsageError(f"--kind {kind}: unknown; the kinds are {', '.join(sorted(record_kinds()))}")


def _lines(path: Path, ranks: set[int], kinds: set[str], steps: StepRanges) -> Iterator[tuple[str, int]]:
    """The text of each record, and after each file the number of records that could not be read."""
    from ddpcheck.analysis.run_reader import by_start
    from ddpcheck.records.folding import FoldList
    from ddpcheck.records.kinds.folds import SummaryRecord
    from ddpcheck.records.kinds.rank import RankHeader
    from ddpcheck.records.reader import RecordFile
    from ddpcheck.records.registry import RANK_FILES, to_mapping

    folds = FoldList(path)
    folds.refresh()
    for file in sorted(path.glob(RANK_FILES), key=by_start):
        reading = RecordFile(file, folds)
        # A rank that was started again has further files.
        attempt = by_start(file)[1]
        name: dict[str, Any] = {"rank": None, **({"attempt": attempt} if attempt else {})}
        for record in reading.all():
            if isinstance(record, RankHeader):
                name["rank"] = record.rank
            # The steps that it sums up are printed as they are.
            if (ranks and name["rank"] not in ranks) or isinstance(record, SummaryRecord):
                continue
            if kinds and record.kind not in kinds:
                continue
            raw = to_mapping(record)
            if not steps or _has_step(raw, steps):
                yield json.dumps({**name, **raw}, separators=(",", ":")), 0
        yield "", reading.bad


def _has_step(raw: dict[str, Any], steps: StepRanges) -> bool:
    first = raw.get("step", raw.get("first", raw.get("forward")))
    if type(first) is not int:
        return False
    count = len(raw.get("total") or raw.get("values") or ()) or raw.get("steps", 1)
    if type(last := raw.get("last")) is int:
        count = last + 1 - first
    return any(step in steps for step in range(first, first + max(1, count if type(count) is int else 1)))
