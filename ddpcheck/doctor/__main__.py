"""`python -m ddpcheck.doctor` under any launcher: one rank sends its facts and gets the report of all ranks."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ddpcheck.doctor.facts.injection import disable_recording, injection_in_this_rank

if TYPE_CHECKING:
    from ddpcheck.doctor.model import DoctorReport

EXIT_PROBLEM = 10


def main() -> int:
    """Returns 10 if there is a problem; torchrun itself then exits with 1."""
    options = _options()
    # Both must run before torch is imported.
    injection = injection_in_this_rank()
    disable_recording()
    from ddpcheck.doctor.rendezvous import report_as_rank

    report, first_here = report_as_rank(Path(options.folder), injection, options.wait)
    if options.result:
        if first_here:
            _write(Path(options.result), report.to_json())
        return 0
    # Rank 0 prints the report of all ranks; a rank that could not reach the others prints its own.
    if first_here and (report.context.rendezvous_error or not _own_rank()):
        sys.stdout.write(report.to_json() if options.json else _as_text(report))
        sys.stdout.flush()
    return EXIT_PROBLEM if report.has_problem else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m ddpcheck.doctor", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.add_argument("--wait", type=float, default=60.0, help="seconds to wait for all ranks")
    parser.add_argument("--folder", default="ddpcheck-runs", help="folder for run folders, which is checked")
    parser.add_argument(
        "--result", default="", help="print nothing; the first rank of each host writes JSON to this file"
    )
    return parser.parse_args()


def _own_rank() -> int | None:
    from ddpcheck.doctor.facts.record import rank_numbers

    return rank_numbers(os.environ)["rank"]


def _as_text(report: DoctorReport) -> str:
    """The terminal report; JSON if the rank's Python does not have rich."""
    try:
        from ddpcheck.reports.terminal.doctor import as_text
    except ImportError:
        return report.to_json()
    return as_text(report, sys.stdout)


def _write(path: Path, text: str) -> None:
    """Write atomically; do nothing if this host does not have the folder."""
    temporary = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
    with contextlib.suppress(OSError):
        temporary.write_text(text)
        os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
