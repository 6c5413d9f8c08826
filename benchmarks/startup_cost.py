"""Start-up time that ddpcheck adds to a Python process without a process group, with and without torch.

python benchmarks/startup_cost.py [--rounds N]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

from ddpcheck.config import Config
from ddpcheck.launcher.process.command import command_environment

LIMIT_SECONDS = 0.15
PROGRAMS = {"python alone": "pass", "python with torch": "import torch"}


def seconds(program: str, environment: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    over = []
    with tempfile.TemporaryDirectory() as folder:
        plain = dict(os.environ)
        watched = command_environment(Config(run_dir=folder, run_id="startup"))
        for name, program in PROGRAMS.items():
            pairs = [(seconds(program, plain), seconds(program, watched)) for _ in range(options.rounds)]
            added = statistics.median(second - first for first, second in pairs)
            ratio = statistics.median(second / first for first, second in pairs)
            without = statistics.median(first for first, _ in pairs)
            print(f"{name}: {without:.3f} s without, {added * 1e3:+.1f} ms with ddpcheck (ratio {ratio:.3f})")
            if added > LIMIT_SECONDS:
                over.append(name)
        if os.listdir(folder):
            sys.exit(f"a process that is no rank left {os.listdir(folder)} behind")
    if over:
        sys.exit(f"start-up: over {LIMIT_SECONDS} s for {', '.join(over)}")


if __name__ == "__main__":
    main()
