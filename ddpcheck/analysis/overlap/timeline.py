"""One timeline of all profiled ranks of a run, for Perfetto."""

from __future__ import annotations

from pathlib import Path

from ddpcheck.analysis.overlap.build import traces_of_run
from ddpcheck.traces.analyse import analyse
from ddpcheck.traces.merged import write_merged

TIMELINE = "timeline.json.gz"


def write_timeline(run: Path, out: Path) -> tuple[int, tuple[str, ...]]:
    """Write the traces of all ranks as one file; returns the number of ranks, and why others were left out."""
    traces, left_out = traces_of_run(run)
    write_merged(traces, analyse(traces), out)
    return len(traces), tuple(left_out)
