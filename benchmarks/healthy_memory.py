"""Runs healthy jobs for thousands of steps and checks that no memory finding is raised.

python benchmarks/healthy_memory.py [--steps 3000] [--cases NAME,NAME]

Averages, logs and checkpoints on one rank, inputs whose length changes, caches that fill. Exits 1 at a warning.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from healthy_memory_job import CASES

BIN = Path(sys.executable).parent
JOB = Path(__file__).with_name("healthy_memory_job.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--cases", default=",".join(CASES))
    options = parser.parse_args()
    wrong = False
    print(f"{'job':32} {'steps':>6} {'MB after steps, rank 0':>28} {'rank 1':>14}  said")
    for case in options.cases.split(","):
        with tempfile.TemporaryDirectory() as folder:
            report = watch(case, options.steps, Path(folder) / "run")
        codes = [finding["code"] for finding in report["findings"] if finding["severity"] != "note"]
        wrong = wrong or bool(codes)
        curves = [spread(row["curve"]) for row in report["memory"]["ranks"]]
        print(
            f"{case:32} {report['steps']:>6} {curves[0]:>28} {curves[1]:>14}  {' '.join(codes) or 'nothing'}"
        )
        sys.stdout.flush()
    sys.exit(1 if wrong else 0)


def watch(case: str, steps: int, folder: Path) -> dict[str, Any]:
    command = [BIN / "ddpcheck", "run", "--fail-on", "never", "--out", folder, "--", sys.executable, JOB]
    words = [str(word) for word in [*command, "--cases", case, "--steps", steps]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=900)
    if done.returncode:
        sys.exit(done.stderr)
    return dict(json.loads((folder / "report.json").read_text()))


def spread(curve: list[list[int]]) -> str:
    """The first fifth of the way, the middle and the end."""
    places = (len(curve) // 5, len(curve) // 2, -1)
    return " ".join(f"{curve[place][1] / 1e6:.0f}" for place in places)


if __name__ == "__main__":
    main()
