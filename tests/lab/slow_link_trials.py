"""Training jobs on labs with a slow link, a slow host or neither, many times over, and what is said of them.

    python -m tests.lab.slow_link_trials --hosts 4 --slow 50 --times 3
    python -m tests.lab.slow_link_trials --hosts 4 --late 0.1
    python -m tests.lab.slow_link_trials --hosts 3 --times 20

One line a trial. Exits 1 where one of them says anything but what it should. Needs root.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.integration.conftest import BIN, JOBS, environment
from tests.lab.host import Host
from tests.lab.lab import Lab, make_lab

WATCHED = ("DDP402", "DDP403")


def main() -> int:
    options = _options()
    wrong = 0
    with tempfile.TemporaryDirectory() as scratch:
        kept = options.keep or Path(scratch)
        for number in range(options.times):
            folder = kept / f"{_name(options)}-{number}"
            with make_lab(options.hosts, folder) as lab:
                _limit(lab, options)
                report = _train(lab, folder, options, port=29500 + number)
            wrong += _tell(options, report)
    print(f"{options.times - wrong} of {options.times} as they should be", flush=True)
    return int(wrong > 0)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--megabits", type=float, default=200.0, help="of every host's cable")
    parser.add_argument("--slow", type=float, default=0.0, help="megabits of the odd host's cable")
    parser.add_argument("--way", choices=("both", "sending", "receiving"), default="both")
    parser.add_argument("--late", type=float, default=0.0, help="seconds that the odd host computes longer")
    parser.add_argument("--odd", type=int, default=2, help="the odd host's number")
    parser.add_argument("--per-node", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=12.0, help="about how long to train")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--pace", type=float, default=0.03)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="where the run folders are to stay")
    return parser.parse_args()


def _name(options: argparse.Namespace) -> str:
    kind = (
        f"slow{options.slow:g}{options.way}"
        if options.slow
        else f"late{options.late:g}"
        if options.late
        else "sound"
    )
    return f"{options.hosts}x{options.per_node}-{kind}"


def _limit(lab: Lab, options: argparse.Namespace) -> None:
    for host in lab.hosts:
        host.limit_link(options.megabits)
    if options.slow and options.way in ("both", "sending"):
        lab[options.odd].limit_sending(options.slow)
    if options.slow and options.way in ("both", "receiving"):
        lab[options.odd].limit_receiving(options.slow)


def _steps(options: argparse.Namespace) -> int:
    """As many as take about the time that was asked for."""
    ranks = options.hosts * options.per_node
    megabits = 4 * options.width**2 * 2 * (ranks - 1) / ranks * 8e-6
    step = megabits / (options.slow or options.megabits) + options.pace + options.late
    return max(30, round(options.seconds / step))


def _train(lab: Lab, folder: Path, options: argparse.Namespace, port: int) -> dict[str, Any]:
    out = folder / "run"

    def launch(number: int, host: Host) -> list[object]:
        job = [BIN / "python", JOBS / "nodes.py", "--nnodes", options.hosts, "--node-rank", number]
        job += ["--per-node", options.per_node, "--width", options.width, "--steps", _steps(options)]
        job += ["--pace", options.pace, "--late-node", options.odd, "--late", options.late]
        return [BIN / "ddpcheck", "run", "--quiet", "--out", out, "--run-id", folder.name, "--", *job]

    def told(number: int, host: Host) -> dict[str, str]:
        return environment(MASTER_ADDR=lab[0].name, MASTER_PORT=str(port))

    ended = lab.run_all(launch, env=told, seconds=300)
    if not (out / "report.json").is_file():
        sys.exit("\n".join(map(str, ended)))
    return dict(json.loads((out / "report.json").read_text()))


def _tell(options: argparse.Namespace, report: dict[str, Any]) -> bool:
    """One line about a trial; whether it is wrong."""
    found = [one for one in report["findings"] if one["code"] in WATCHED and one["severity"] != "note"]
    should = "DDP403" if options.slow else "DDP402" if options.late else ""
    said = [one["code"] for one in found]
    step = report["time"][0]["step_us"] / 1000 if report["time"] else 0.0
    wrong = said != ([should] if should else [])
    if should == "DDP403" and not wrong:
        wrong = f"node{options.odd}" not in found[0]["evidence"]["nodes"]
    print(
        f"{time.strftime('%H:%M:%S')} {_name(options)}: step {step:.0f} ms; "
        f"{'; '.join(one['code'] + ' ' + one['message'] for one in found) or 'nothing'}{'  WRONG' if wrong else ''}",
        flush=True,
    )
    return wrong


if __name__ == "__main__":
    sys.exit(main())
