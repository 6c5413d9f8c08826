"""`import ddpcheck.auto` at the top of a script: the manual way in, where the bootstrap cannot reach.

Under `ddpcheck run` (with `python -I`, `-S` or `-E`) it joins that run. Without it, the ranks of the job
meet in a run folder of their own, which `ddpcheck report` reads afterwards.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ddpcheck.config import ENV_CONFIG, Config
from ddpcheck.injection import arm
from ddpcheck.launcher.multi_node.job_folder import find_job_folder, local_rank
from ddpcheck.launcher.run_folder import begin_run


def _begin() -> None:
    """Make or find the job's run folder and hand it to this process and all it starts."""
    command = [sys.executable, *sys.argv]
    folder = find_job_folder(Path.cwd(), command)
    config = Config(run_dir=str(folder.path), run_id=folder.run_id)
    begin_run(folder, command, config)
    os.environ.update(config.to_environment())
    if local_rank(os.environ) == 0:
        sys.stderr.write(f"ddpcheck: watching; when the job has ended, run `ddpcheck report {folder.path}`\n")


if __name__ != "__main__":
    try:
        if not os.environ.get(ENV_CONFIG):
            _begin()
        arm()
    except Exception as error:  # the script goes on, unwatched
        sys.stderr.write(f"ddpcheck: not watching: {error}\n")
