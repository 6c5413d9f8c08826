"""A long job under `ddpcheck run`: memory of ranks and launcher, cost per step and disk, and a divergence near the end.

    python benchmarks/soak.py                   (300,000 steps on two ranks)
    python benchmarks/soak.py --steps 20000

Exits 1 where memory or the cost per step grows from the second quarter of the job to the last, where the records of a
rank exceed 64 MB, or where the report does not date the divergence.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from ddpcheck.records.folding import further_files  # noqa: E402

DDPCHECK = Path(sys.executable).parent / "ddpcheck"
JOB = ROOT / "benchmarks" / "soak_job.py"
MOST_BYTES = 64 << 20
# From the second quarter to the last: relative growth of memory and of the cost, and of memory in bytes.
MOST_GROWTH, MOST_COST_GROWTH = 0.05, 0.25
MOST_BYTES_GROWN = 8 << 20


@dataclass
class Samples:
    """Of one process: seconds since the start, and its anonymous memory in bytes."""

    memory: list[tuple[float, int]] = field(default_factory=list)

    def between(self, first: float, last: float) -> float:
        return median([value for seconds, value in self.memory if first <= seconds <= last] or [0])


def children_of(pid: int) -> list[int]:
    found = [pid]
    for each in found:
        for path in Path(f"/proc/{each}/task").glob("*/children"):
            found += map(int, path.read_text().split())
    return found


def memory_of(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")), 0)


def watch(command: list[str], folder: Path) -> tuple[dict[int, Samples], float]:
    """The memory of the launcher, of the processes below it, and how long they ran."""
    began = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=(folder / "stderr").open("w"))
    samples: dict[int, Samples] = {}
    while child.poll() is None:
        for pid in children_of(child.pid):
            try:
                value = memory_of(pid)
            except OSError:
                continue  # it has just ended
            samples.setdefault(pid, Samples()).memory.append((time.monotonic() - began, value))
        time.sleep(0.5)
    return samples, time.monotonic() - began


def costs(run: Path, steps: int) -> tuple[float, float]:
    """Microseconds that ddpcheck took per step: in the second quarter, and in the last."""
    lines = subprocess.run(
        [DDPCHECK, "records", run, "--rank", "0", "--kind", "clocks"],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    ).stdout.splitlines()
    took: dict[int, int] = {}
    for raw in map(json.loads, lines):
        took.update(enumerate(raw.get("watching", ()), raw["step"]))
    quarters = [(steps // 4, steps // 2), (3 * steps // 4, steps)]
    second, last = [median([took[n] for n in range(*each) if n in took] or [0]) for each in quarters]
    return float(second), float(last)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300_000)
    parser.add_argument("--keep", type=Path, help="a folder for the run")
    parser.add_argument("options", nargs="*", help="options of `ddpcheck run`, after --")
    options = parser.parse_args()
    planted = options.steps - options.steps // 50
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        run = folder / "run"
        job = [sys.executable, str(JOB), "--steps", str(options.steps), "--diverge-at", str(planted)]
        samples, seconds = watch(
            [str(DDPCHECK), "run", "--quiet", "--out", str(run), *options.options, "--", *job], folder
        )
        report = json.loads((run / "report.json").read_text())
        before, after = costs(run, options.steps)
        sizes = [
            sum(each.stat().st_size for each in (path, *further_files(path)))
            for path in sorted(run.glob("rank-*.jsonl"))
        ]
        folded = report["run"].get("folded", [])
    sound = True
    print(f"{options.steps} steps in {seconds:.0f} s")
    for pid, each in samples.items():
        if len(each.memory) < 8 or each.memory[-1][0] - each.memory[0][0] < seconds / 2:
            continue
        second, last = each.between(seconds / 4, seconds / 2), each.between(3 * seconds / 4, seconds)
        flat = last - second <= max(MOST_BYTES_GROWN, MOST_GROWTH * second)
        sound = sound and flat
        name = "launcher" if pid == min(samples) else "process"
        print(f"{name} {pid}: {second / 1e6:.1f} MB, later {last / 1e6:.1f} MB{'' if flat else ': grows'}")
    print(f"cost per step: {before:.0f} us, later {after:.0f} us")
    sound = sound and after <= (1 + MOST_COST_GROWTH) * before
    for size in sizes:
        print(f"records of a rank: {size / 1e6:.1f} MB, {size / options.steps:.0f} bytes per step")
    sound = sound and max(sizes) <= MOST_BYTES
    print(f"folded steps: {folded}")
    found = [(row["code"], row["step"]) for row in report["findings"] if row["severity"] == "error"]
    print(f"planted at step {planted}, found {found}")
    return 0 if sound and [step for _, step in found] == [planted] else 1


if __name__ == "__main__":
    sys.exit(main())
