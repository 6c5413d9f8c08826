"""Training jobs on labs with a slow link, a host that is slow in computing, or neither, and what is said of them.

    python -m tests.lab.slow_link_trials FOLDER                  all of them, which takes about 25 minutes
    python -m tests.lab.slow_link_trials FOLDER --only '4x1 slow50*' --times 1
    python -m tests.lab.slow_link_trials FOLDER --times 0        only judge again what is in FOLDER

One line a trial, then a table; exits 1 where anything was said but what should be. The run folders stay. Needs root.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.report import Report
from ddpcheck.analysis.report_builder import analyse_run
from tests.helpers.commands import BIN, environment
from tests.helpers.paths import JOBS
from tests.lab.host import Host
from tests.lab.lab import Lab, make_lab

WATCHED = ("DDP402", "DDP403")
# Megabits a second of every sound cable: so little that the processors are no matter.
USUAL = 200.0
ODD = 2


@dataclass(frozen=True)
class Trial:
    """What is done to one job. Rates in megabits a second, of the odd host's cable; times in seconds."""

    hosts: int
    per_node: int = 1
    slow: float = 0.0
    way: str = "both"
    late: float = 0.0
    # How often it is to be run.
    times: int = 3
    width: int = 512
    pace: float = 0.03
    seconds: float = 10.0

    @property
    def name(self) -> str:
        odd = f"slow{self.slow:g}{'' if self.way == 'both' else ' ' + self.way}" if self.slow else "sound"
        return f"{self.hosts}x{self.per_node} {f'late{1000 * self.late:g}' if self.late else odd}"

    @property
    def steps(self) -> int:
        """As many as take about that time."""
        ranks = self.hosts * self.per_node
        megabits = 4 * self.width**2 * 2 * (ranks - 1) / ranks * 8e-6
        return max(30, round(self.seconds / (megabits / (self.slow or USUAL) + self.pace + self.late)))

    @property
    def should(self) -> list[str]:
        """Of two hosts it cannot be told whose link is slow."""
        return ["DDP402"] if self.late else ["DDP403"] if self.slow and self.hosts > 2 else []

    def limit(self, lab: Lab) -> None:
        for host in lab.hosts:
            host.limit_link(USUAL)
        odd = lab[min(ODD, self.hosts - 1)]
        if self.slow and self.way in ("both", "sending"):
            odd.limit_sending(self.slow)
        if self.slow and self.way in ("both", "receiving"):
            odd.limit_receiving(self.slow)


TRIALS = (
    *(Trial(hosts, times=10) for hosts in (3, 4)),
    *(Trial(hosts, slow=USUAL / factor) for hosts in (3, 4) for factor in (2, 4, 10)),
    *(Trial(hosts, late=0.1) for hosts in (3, 4)),
    Trial(4, slow=50.0, way="sending", times=2),
    Trial(4, slow=50.0, way="receiving", times=2),
    Trial(3, per_node=2, slow=50.0, times=2),
    Trial(3, per_node=2, times=2),
    Trial(2, slow=50.0, times=2),
    Trial(2, times=2),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="*")
    parser.add_argument("--times", type=int, help="instead of what each trial asks for")
    options = parser.parse_args()
    for trial in TRIALS:
        if fnmatch.fnmatch(trial.name, options.only):
            for _ in range(trial.times if options.times is None else options.times):
                _run(trial, options.folder.absolute())
    return _tell_all(options.folder)


def _run(trial: Trial, kept: Path) -> None:
    number = len(list(kept.glob(f"{trial.name}-*"))) if kept.exists() else 0
    folder = kept / f"{trial.name}-{number}"
    with make_lab(trial.hosts, folder) as lab:
        trial.limit(lab)
        _train(trial, lab, folder, 29500 + number)
    (folder / "trial.json").write_text(json.dumps(asdict(trial)))
    report = analyse_run(folder / "run")
    print(f"{time.strftime('%H:%M:%S')} {trial.name}: {_line(trial, report)}", flush=True)


def _train(trial: Trial, lab: Lab, folder: Path, port: int) -> None:
    def launch(number: int, host: Host) -> list[object]:
        job = [BIN / "python", JOBS / "nodes.py", "--nnodes", trial.hosts, "--node-rank", number]
        job += ["--per-node", trial.per_node, "--width", trial.width, "--steps", trial.steps]
        job += ["--pace", trial.pace, "--late-node", ODD, "--late", trial.late]
        watch = ["--quiet", "--out", folder / "run", "--run-id", "trial"]
        return [BIN / "ddpcheck", "run", *watch, "--", *job]

    def told(number: int, host: Host) -> dict[str, str]:
        return environment(MASTER_ADDR=lab[0].name, MASTER_PORT=str(port))

    ended = lab.run_all(launch, env=told, seconds=300)
    if any(one.status for one in ended):
        sys.exit("\n".join(map(str, ended)))


def _found(report: Report) -> list[Finding]:
    return [one for one in report.findings if one.code in WATCHED and one.severity.value != "note"]


def _is_right(trial: Trial, report: Report) -> bool:
    found = _found(report)
    if [one.code for one in found] != trial.should:
        return False
    if trial.should == ["DDP402"]:
        return found[0].ranks == (ODD,)
    # Of one direction both ends may be named.
    most = 1 if trial.way == "both" else 2
    named = [one.evidence["nodes"] for one in found]
    return all(f"node{ODD}" in nodes and len(nodes) <= most for nodes in named)


def _line(trial: Trial, report: Report) -> str:
    said = "; ".join(f"{one.code} {one.message}" for one in _found(report)) or "nothing"
    return f"step {_step(report):.0f} ms; {said}{'' if _is_right(trial, report) else '  WRONG'}"


def _step(report: Report) -> float:
    return report.time[0].step_us / 1000 if report.time else 0.0


def _tell_all(folder: Path) -> int:
    """A row for each kind of trial; 1 where one was wrong."""
    done: dict[Trial, list[Report]] = {}
    for path in sorted(folder.glob("*/trial.json")):
        trial = Trial(**json.loads(path.read_text()))
        done.setdefault(trial, []).append(analyse_run(path.parent / "run"))
    print(
        "| hosts x ranks | odd host | trials | right | it gave, Mbit/s | others gave | cost, ms a step | really |"
    )
    print("|---|---|---:|---:|---|---|---|---:|")
    for trial, reports in done.items():
        sound = [
            _step(report)
            for other, reports in done.items()
            for report in reports
            if not other.slow
            and not other.late
            and (other.hosts, other.per_node) == (trial.hosts, trial.per_node)
        ]
        print(_row(trial, reports, sound))
    return int(not all(_is_right(trial, report) for trial, reports in done.items() for report in reports))


def _row(trial: Trial, reports: Sequence[Report], sound: Sequence[float]) -> str:
    right = sum(_is_right(trial, report) for report in reports)
    odd = trial.name.partition(" ")[2]
    told = [_figures(report) for report in reports]
    gave, others, cost = (
        _range([one[place] for one in told if one[place] is not None]) for place in range(3)
    )
    more = median(map(_step, reports)) - median(sound) if sound and (trial.slow or trial.late) else None
    really = "-" if more is None else f"{more:.0f}"
    cells = (f"{trial.hosts} x {trial.per_node}", odd, len(reports), right, gave, others, cost, really)
    return f"| {' | '.join(map(str, cells))} |"


def _figures(report: Report) -> tuple[float | None, ...]:
    """What the slow link gave, what the others did, and the cost; of a sound job what all links gave."""
    slow: dict[str, Any] | None = report.links.get("slow")
    if slow is not None:
        cost = slow["cost_us"]
        return slow["bandwidth"] * 8e-6, slow["usual"] * 8e-6, None if cost is None else cost / 1000
    late = next((table.straggler for table in report.time if table.straggler is not None), None)
    rates = [link["bandwidth"] * 8e-6 for link in report.links.get("links", ())]
    return None, median(rates) if rates else None, late.cost_us / 1000 if late is not None else None


def _range(figures: Sequence[float | None]) -> str:
    known = sorted(figure for figure in figures if figure is not None)
    if not known:
        return "-"
    low, high = f"{known[0]:.0f}", f"{known[-1]:.0f}"
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    sys.exit(main())
