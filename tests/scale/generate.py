"""Generates a run folder of many ranks from one of a few, marked as synthetic."""

from __future__ import annotations

import json
from pathlib import Path

from tests.scale.node_files import NodeFiles
from tests.scale.plan import Plan
from tests.scale.rank_files import RankFiles
from tests.scale.seed import Seed

STORED_SEED = Path(__file__).parent / "seed_run"
# 2026-01-31 10:15 UTC. A constant, so that the same plan gives the same run.
BEGIN = 1_769_854_500.0


def make_run(out: Path, seed_path: Path, plan: Plan) -> None:
    """The folder must not exist yet."""
    out.mkdir(parents=True)
    seed = Seed(seed_path)
    ranks = RankFiles(seed, plan, out, BEGIN)
    ranks.write()
    NodeFiles(seed, plan, out, ranks, BEGIN).write()
    seconds = plan.steps * ranks.step_seconds + 6.0
    run = {
        **seed.run,
        "id": out.name,
        "name": out.name,
        "host": plan.host(0),
        "started": "2026-01-31T10:15:00+00:00",
        "ended": "2026-01-31T10:15:00+00:00",
        "seconds": round(seconds, 3),
        "synthetic": plan.description(seed_path.name),
    }
    (out / "run.json").write_text(json.dumps(run, indent=1) + "\n")
