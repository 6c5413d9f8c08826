"""Enables ddpcheck by `import ddpcheck.auto` at the top of a script, where the bootstrap does not work.

Under `ddpcheck run` (with `python -I`, `-S` or `-E`) the process joins that run. Without `ddpcheck run`, the ranks of
the job share a new run folder, which `ddpcheck report` reads afterwards.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ddpcheck.config import ENV_CONFIG, Config
from ddpcheck.injection import arm
from ddpcheck.launcher.job_identity import local_rank
from ddpcheck.launcher.run_folder import begin_run, find_job_folder


def _begin() -> None:
    """Create or find the job's run folder, and pass it to this process and its children in the environment."""
    command = [sys.executable, *sys.argv]
    folder = find_job_folder(Path.cwd(), command)
    config = Config(run_dir=str(folder.path), run_id=folder.run_id, own_launcher=False)
    begin_run(folder, command, config)
    os.environ.update(config.to_environment())
    if local_rank(os.environ) == 0:
        sys.stderr.write(
            f"ddpcheck: checking this job; when it has ended, run `ddpcheck report {folder.path}`\n"
        )


if __name__ != "__main__":
    try:
        if not os.environ.get(ENV_CONFIG):
            _begin()
        arm()
    except Exception as error:  # the script continues without checks
        sys.stderr.write(f"ddpcheck: this job is not checked: {error}\n")
