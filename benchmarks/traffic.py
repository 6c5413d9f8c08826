"""Compares the bytes counted on each kind of link with what AllReduce must move, 2(n-1)/n of the gradients.

Hosts are network namespaces of this machine, with taps between them; needs root. Exits 1 where a figure is further
from what is expected than the share of a step at either end explains.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.helpers.commands import environment  # noqa: E402
from tests.lab.lab import Lab, make_lab, missing  # noqa: E402

BIN = Path(sys.executable).parent
# Hosts, and ranks on each.
LAYOUTS = ((1, 2), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))
STEPS = 100
PACE = 0.06
MOST_OFF = 0.05
MOST_SECONDS = 300


def measure(lab: Lab, per_node: int, folder: Path, port: int) -> dict[str, Any]:
    """The report of one job on all hosts."""
    job = [BIN / "python", ROOT / "tests/jobs/nodes.py", "--nnodes", len(lab.hosts), "--per-node", per_node]
    job += ["--width", 1024, "--steps", STEPS, "--pace", PACE]
    watch = [BIN / "ddpcheck", "run", "--quiet", "--out", folder / "run", "--"]
    told = environment(MASTER_ADDR="node0", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="net0")
    lab.run_all(
        lambda number, host: [*watch, *job, "--node-rank", number],
        env=lambda number, host: told,
        seconds=MOST_SECONDS,
    )
    return dict(json.loads((folder / "run" / "report.json").read_text()))


def rows(layout: tuple[int, int], report: dict[str, Any]) -> list[tuple[str, ...]]:
    """One for each kind of link that had to move something, with the node that is furthest off."""
    found = []
    for kind in ("network", "loopback"):
        nodes = [(node["classes"][kind], node["steps"]) for node in report["traffic"]["nodes"]]
        nodes = [(moved, steps) for moved, steps in nodes if moved["expected"]]
        if nodes:
            moved, steps = max(nodes, key=lambda node: abs(node[0]["sent"] / node[0]["expected"] - 1))
            ratio = moved["sent"] / moved["expected"]
            sizes = f"{moved['expected'] / 1e6:.2f}", f"{moved['sent'] / 1e6:.2f}"
            found.append((f"{layout[0]} x {layout[1]}", kind, *sizes, f"{ratio:.3f}", f"{steps:.0f}"))
    return found


def main() -> int:
    if missing():
        print(f"nothing measured: {missing()}")
        return 0
    print("| hosts x ranks | link | expected, MB a step | sent, MB a step | ratio | steps |")
    print("|---|---|---:|---:|---:|---:|")
    missed = False
    for number, layout in enumerate(LAYOUTS):
        with tempfile.TemporaryDirectory() as folder, make_lab(layout[0], Path(folder), cards=(1000,)) as lab:
            report = measure(lab, layout[1], Path(folder), 29800 + number)
        alarms = [finding["code"] for finding in report["findings"] if finding["severity"] != "note"]
        for row in rows(layout, report):
            print("| " + " | ".join(row) + " |", flush=True)
            missed = missed or abs(float(row[4]) - 1) > MOST_OFF
        if alarms:
            print("findings:", *alarms)
        missed = missed or bool(alarms)
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
