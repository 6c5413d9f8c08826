"""`python -m ddpcheck.doctor` under any launcher: one rank tells its facts, and hears what all of them say."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ddpcheck.doctor.facts.injection import in_this_rank, stand_aside

if TYPE_CHECKING:
    from ddpcheck.doctor.model import DoctorReport

PROBLEM = 10


def main() -> int:
    """10 where there is a problem; under torchrun that becomes its own 1."""
    options = _options()
    # Both before torch is imported.
    injection = in_this_rank()
    stand_aside()
    from ddpcheck.doctor.rank import report_as_rank

    report, first_here = report_as_rank(Path(options.folder), injection, options.wait)
    if options.result:
        if first_here:
            _write(Path(options.result), report.to_json())
        return 0
    # Rank 0 speaks for all; who could not meet the others speaks for itself.
    if first_here and (report.scene.apart or not _own_rank()):
        sys.stdout.write(report.to_json() if options.json else _shown(report))
        sys.stdout.flush()
    return PROBLEM if report.has_problem else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ddpcheck.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds for all ranks to report")
    parser.add_argument("--folder", default="ddpcheck-runs", help="where a run folder would be made")
    parser.add_argument(
        "--result", default="", help="print nothing; the first rank of a host writes JSON here"
    )
    return parser.parse_args()


def _own_rank() -> int | None:
    from ddpcheck.doctor.facts.identity import rank_numbers

    return rank_numbers(os.environ)["rank"]


def _shown(report: DoctorReport) -> str:
    """As a terminal shows it; where the rank's Python has no rich, what programs read has to do."""
    try:
        from ddpcheck.reports.terminal.doctor import as_text
    except ImportError:
        return report.to_json()
    return as_text(report, sys.stdout)


def _write(path: Path, text: str) -> None:
    """Whole or not at all, and not where this host has no such folder."""
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    with contextlib.suppress(OSError):
        temporary.write_text(text)
        os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
