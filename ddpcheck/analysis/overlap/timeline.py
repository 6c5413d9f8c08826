"""The traces of a stored run, for one timeline of all its ranks."""

from __future__ import annotations

from pathlib import Path

from ddpcheck.analysis.overlap.build import traces_of
from ddpcheck.analysis.run_reader import Run
from ddpcheck.errors import TraceUnreadable
from ddpcheck.traces.rank_trace import RankTrace


def traces_of_run(path: Path) -> tuple[list[RankTrace], list[str]]:
    """Of the last attempt that was profiled, with a sentence for each trace that could not be used."""
    run = Run(path)
    run.finish()
    profiled = [attempt for attempt in run.ordered() if attempt.window]
    if not profiled:
        raise TraceUnreadable(f"nothing was profiled in {path}: use `ddpcheck run --profile`")
    traces, left_out = traces_of(profiled[-1], path)
    if not traces:
        raise TraceUnreadable(f"there is no trace to show in {path}: {'; '.join(left_out)}")
    return traces, left_out
