"""Two jobs on a Ray cluster of two local nodes that was started without ddpcheck.

The first runs under `ddpcheck run`, the second with the variables of `ddpcheck env` and is collected afterwards.
Arguments: the path of ddpcheck, and a folder for the runs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from ray.cluster_utils import Cluster

JOB = Path(__file__).with_name("by_ray.py")


def main(ddpcheck: str, folder: Path) -> int:
    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=1)
    try:
        job = [sys.executable, str(JOB)]
        watched = [ddpcheck, "run", "--out", str(folder / "watched"), "--", *job, "healthy", cluster.address]
        statuses = [subprocess.call(watched)]
        collected = str(folder / "collected")
        prepared = subprocess.run(
            [ddpcheck, "env", "--format", "json", "--out", collected], capture_output=True, check=True
        )
        environ = {**os.environ, **json.loads(prepared.stdout)}
        statuses.append(subprocess.call([*job, "diverging", cluster.address], env=environ))
        statuses.append(subprocess.call([ddpcheck, "collect", collected]))
    finally:
        cluster.shutdown()
    print(statuses)
    return 0 if statuses == [0, 0, 10] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
