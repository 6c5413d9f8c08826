"""The fault campaign: `python -m tests.chaos [--jobs 220] [--files 10000] [--docs docs/reliability.md]`.

Real jobs on two ranks under `ddpcheck run`, each with one fault at a random moment, and commands of ddpcheck on damaged
files. docs/reliability.md says what has to hold. Exits with 1 if something did not.

With `--continue`, outcomes of earlier calls in build/chaos count, and only what is missing is run; with `--seconds`,
nothing is begun after that time.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tests.chaos.campaign import Outcome, Results, campaign, faults
from tests.chaos.document import write_page
from tests.chaos.faults import FAULTS
from tests.chaos.faulty_io import preloaded
from tests.chaos.fuzzing import fuzz

JOBS_PER_FAULT = 10
FILES = 10_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.split("\n\n")[0])
    parser.add_argument("--jobs", type=int, default=JOBS_PER_FAULT * len(FAULTS))
    parser.add_argument("--files", type=int, default=FILES, help="damaged files")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="faults whose name contains this")
    parser.add_argument("--at-once", type=int, default=2, help="jobs at a time")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after this time")
    parser.add_argument(
        "--continue", dest="resume", action="store_true", help="keep outcomes of earlier calls"
    )
    parser.add_argument("--folder", type=Path, default=Path("build/chaos"), help="folder of outcomes")
    parser.add_argument("--docs", type=Path, help="page whose tables are written anew")
    options = parser.parse_args()
    began = time.monotonic()
    jobs, files = Results(options.folder / "jobs.jsonl"), Results(options.folder / "files.jsonl")
    if not options.resume:
        for results in (jobs, files):
            results.path.unlink(missing_ok=True)

    def show(outcome: Outcome) -> None:
        jobs.add(outcome)
        result = outcome.void or "; ".join(outcome.wrong) or "passed"
        print(
            f"{outcome.number + 1:4}/{options.jobs} {outcome.fault:20} seed {outcome.seed}: {result}",
            flush=True,
        )

    with preloaded():
        for fault in FAULTS:
            if reason := fault.missing():
                print(f"{fault.name}: skipped, {reason}")
        done = {outcome.number for outcome in jobs}
        numbers = [number for number in range(options.jobs) if number not in done]
        if numbers:
            campaign(
                numbers,
                faults(options.only),
                options.seed,
                at_once=options.at_once,
                seconds=options.seconds,
                keep=options.folder / "kept",
                ended=show,
            )
    left = options.seconds - (time.monotonic() - began)
    fuzz(options.files, options.seed, files, left, options.folder / "kept")
    wrong = sum(bool(each.wrong) for results in (jobs, files) for each in results)
    print(f"{sum(1 for _ in jobs)} jobs, {sum(1 for _ in files)} damaged files: {wrong} did not pass")
    if options.docs:
        write_page(options.docs, list(jobs), list(files), options.seed)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
