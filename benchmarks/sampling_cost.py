"""Cost of sampling a node: CPU time of the launcher's thread over a minute, including start-up.

python benchmarks/sampling_cost.py [--seconds N]

Without a driver, and with 8 GPUs of 18 NVLinks each by the tests' NVML, which answers at once: a real driver takes
time of its own for each call. Exits 1 where sampling takes more than 1 % of a core.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.helpers import nvml

BIN = Path(sys.executable).parent
LIMIT = 0.01
GPUS = "devices 8\nlinks 18\nnvlink 0 1000000\npcie 0 500000000 64\n"
RATES = (2, 20)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        nodes = {"no driver": {}, "8 GPUs": nvml.environment(nvml.compiled_into(folder), GPUS)}
        # All at once: they sleep nearly all of the time.
        running = {
            (node, hz): _start(folder / f"{node}-{hz}", hz, options.seconds, environment)
            for node, environment in nodes.items()
            for hz in RATES
        }
        print(f"{'node':<10}  {'asked':>6}  {'samples':>7}  {'cpu, ms':>8}  {'of a core':>9}  {'log, kB':>7}")
        missed = False
        for (node, hz), process in running.items():
            process.wait()
            [log] = (folder / f"{node}-{hz}").glob("node-*.jsonl")
            effort = json.loads(next(line for line in log.open() if '"sampled"' in line))
            share = effort["cpu_seconds"] / effort["seconds"]
            missed = missed or share > LIMIT
            figures = f"{effort['samples']:>7}  {1000 * effort['cpu_seconds']:>8.0f}  {100 * share:>7.2f} %"
            print(f"{node:<10}  {hz:>3} Hz  {figures}  {log.stat().st_size / 1000:>7.0f}")
    return int(missed)


def _start(folder: Path, hz: int, seconds: float, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    command = [
        BIN / "ddpcheck",
        "run",
        "--quiet",
        "--fail-on",
        "never",
        "--sample-hz",
        str(hz),
        "--out",
        folder,
    ]
    return subprocess.Popen(
        [*command, "--", "sleep", str(seconds)],
        env={**os.environ, **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


if __name__ == "__main__":
    sys.exit(main())
