"""Cost of `ddpcheck report` as ranks and steps double: time, memory, bytes read and written.

    python benchmarks/report_scale.py
    python benchmarks/report_scale.py --ranks 1024 --steps 1000 --seed SEED    (one size, and the page too)
    python benchmarks/report_scale.py --lines                                  (records of version 1)

The runs are made by tests/scale from the records of a real one of four ranks. Exits 1 where a report takes more than
in proportion, more than 2 GB, or does not name the rank and the node that are wrong.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.scale.generate import STORED_SEED, make_run  # noqa: E402
from tests.scale.plan import Plan  # noqa: E402

DDPCHECK = Path(sys.executable).parent / "ddpcheck"
RANKS, STEPS = (64, 128, 256, 512), (100, 200, 400, 800)
# Twice the work, plus noise.
MOST_RATIO = 2.3
MOST_MEMORY = 2 << 30


@dataclass(frozen=True)
class Cost:
    """Of one command."""

    seconds: float
    cpu: float
    memory: int


def plan_of(ranks: int, steps: int, blocks: bool) -> Plan:
    """A rank that parts late in the job, and a slow node, neither of them the first nor the last."""
    return Plan(
        ranks=ranks,
        steps=steps,
        outlier_rank=3 * ranks // 4 + 1,
        outlier_step=3 * steps // 5,
        slow_node=ranks // 8 // 4,
        blocks=blocks,
    )


def cost_of(command: Sequence[str | Path], out: Path) -> Cost:
    began = time.monotonic()
    with out.open("wb") as file:
        child = subprocess.Popen(command, stdout=file)
        _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{command}: status {child.returncode}")
    cpu = used.ru_utime + used.ru_stime
    return Cost(time.monotonic() - began, cpu, used.ru_maxrss << 10)


def is_right(report: Path, plan: Plan) -> bool:
    """Whether the findings are the two that were put in, and no others."""
    found = [(row["code"], row["step"], row["ranks"]) for row in json.loads(report.read_text())["findings"]]
    slow = list(plan.ranks_of(plan.slow_node or 0))
    wanted = [("DDP201", plan.outlier_step, [plan.outlier_rank]), ("DDP402", None, slow)]
    kept = [row for row in found if row[0] in ("DDP201", "DDP402") or row[0] < "DDP300"]
    if kept != wanted:
        print(f"found {found}, and {wanted} were put in")
    return kept == wanted


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def measure(folder: Path, seed: Path, ranks: int, steps: int, blocks: bool) -> tuple[Cost, int, bool]:
    """Made, reported on, and removed again."""
    plan = plan_of(ranks, steps, blocks)
    run, report = folder / "run", folder / "report.json"
    make_run(run, seed, plan)
    cost = cost_of([DDPCHECK, "report", run, "--json"], report)
    size = size_of(run)
    for path in run.iterdir():
        path.unlink()
    run.rmdir()
    return cost, size, is_right(report, plan)


def doubled(seed: Path, blocks: bool) -> bool:
    """Two series: ranks, then steps."""
    sound = True
    print(
        f"{'ranks':>6} {'steps':>6} {'records MB':>10} {'cpu s':>7} {'us/rank-step':>12} {'ratio':>6} {'MB':>5}"
    )
    for sizes in ([(ranks, STEPS[0]) for ranks in RANKS], [(RANKS[0], steps) for steps in STEPS]):
        before = 0.0
        for ranks, steps in sizes:
            with tempfile.TemporaryDirectory() as folder:
                cost, size, right = measure(Path(folder), seed, ranks, steps, blocks)
            ratio = cost.cpu / before if before else 0.0
            print(
                f"{ranks:6} {steps:6} {size / 1e6:10.1f} {cost.cpu:7.2f} {cost.cpu / ranks / steps * 1e6:12.0f} "
                f"{f'{ratio:.2f}' if before else '':>6} {cost.memory / 1e6:5.0f}",
                flush=True,
            )
            sound = sound and right and ratio <= MOST_RATIO and cost.memory < MOST_MEMORY
            before = cost.cpu
        print()
    return sound


def one_size(seed: Path, ranks: int, steps: int, blocks: bool, keep: Path | None) -> bool:
    """One run, its report.json and its page."""
    plan = plan_of(ranks, steps, blocks)
    with tempfile.TemporaryDirectory() as temporary:
        folder = keep or Path(temporary)
        run = folder / "run"
        if not run.exists():
            began = time.monotonic()
            make_run(run, seed, plan)
            print(f"made in {time.monotonic() - began:.0f} s")
        print(
            f"{ranks} ranks, {steps} steps: {size_of(run) / 1e6:.0f} MB in {len(list(run.iterdir()))} files"
        )
        cost = cost_of(
            [DDPCHECK, "report", run, "--json", "--html", folder / "report.html"], folder / "report.json"
        )
        print(
            f"reported on in {cost.seconds:.0f} s, {cost.cpu:.0f} s of a processor "
            f"({cost.cpu / ranks / steps * 1e6:.0f} us a rank and step), {cost.memory / 1e6:.0f} MB of memory"
        )
        for name in ("report.json", "report.html"):
            print(f"{name}: {(folder / name).stat().st_size / 1e6:.2f} MB", flush=True)
        return is_right(folder / "report.json", plan) and cost.memory < MOST_MEMORY


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=Path, default=STORED_SEED, help="a run of a few ranks [stored one]")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--keep", type=Path, help="a folder for the run and its reports")
    parser.add_argument(
        "--lines", action="store_true", help="records of version 1, all of them lines of JSON"
    )
    options = parser.parse_args()
    blocks = not options.lines
    if options.ranks is None:
        return 0 if doubled(options.seed, blocks) else 1
    return 0 if one_size(options.seed, options.ranks, options.steps, blocks, options.keep) else 1


if __name__ == "__main__":
    sys.exit(main())
