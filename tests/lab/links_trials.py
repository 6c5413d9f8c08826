"""Repeated surveys of a lab's links: `python -m tests.lab.links_trials --slow 100 --times 20`.

Without `--slow` all links are equal, and no trial may report one.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.helpers.commands import BIN, environment
from tests.helpers.paths import JOBS
from tests.lab.host import Host
from tests.lab.lab import make_lab


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--megabits", type=float, default=400.0)
    parser.add_argument("--slow", type=float, default=0.0, help="megabits of the last host's link")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=1.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, make_lab(options.hosts, Path(folder)) as lab:
        for host in lab.hosts:
            host.limit_link(options.megabits)
        if options.slow:
            lab.hosts[-1].limit_link(options.slow)

        def launch(number: int, host: Host) -> list[object]:
            static = ["--nnodes", options.hosts, "--node-rank", number, "--master-addr", lab[0].name]
            trials = [JOBS / "links_trials.py", "--times", options.times, "--seconds", options.seconds]
            return [BIN / "torchrun", *static, "--master-port", 29407, *trials]

        ended = lab.run_all(launch, env=lambda number, host: environment(), seconds=1800)
    print(ended[0].stdout)
    if any(one.status for one in ended):
        sys.exit("\n".join(map(str, ended)))


if __name__ == "__main__":
    main()
