"""Generates a run folder of many ranks from a run of a few.

ddpcheck run --out SEED -- python tests/scale/seed_job.py
python -m tests.scale OUT --seed SEED --ranks 1024 --steps 1000 --outlier-rank 777 --outlier-step 600 --slow-node 31
ddpcheck report OUT
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.scale.generate import STORED_SEED, make_run
from tests.scale.plan import Plan


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tests.scale",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    default = Plan()
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to create")
    parser.add_argument(
        "--seed", type=Path, default=STORED_SEED, help="a run of a few ranks [the stored one]"
    )
    parser.add_argument("--ranks", type=int, default=default.ranks)
    parser.add_argument("--per-node", type=int, default=default.per_node)
    parser.add_argument("--steps", type=int, default=default.steps)
    parser.add_argument("--epoch", type=int, default=default.epoch, help="steps per epoch")
    parser.add_argument("--outlier-rank", type=int, help="a rank whose parameters diverge")
    parser.add_argument("--outlier-step", type=int, default=default.outlier_step, help="from this step on")
    parser.add_argument("--slow-node", type=int, help="a node whose backward takes longer")
    parser.add_argument("--slow-by", type=float, default=default.slow_by, help="by this fraction of a step")
    parser.add_argument(
        "--blocks", action="store_true", help="records of steps in blocks, as ranks write them"
    )
    options = vars(parser.parse_args())
    make_run(options.pop("out"), options.pop("seed"), Plan(**options))


if __name__ == "__main__":
    main()
