"""What names a job on all its nodes."""

from __future__ import annotations

import pytest

from ddpcheck.launcher.run_folder import job_id

SLURM = {"SLURM_JOB_ID": "42", "SLURM_STEP_ID": "1"}


@pytest.mark.parametrize(
    ("given", "command", "environ", "expected"),
    [
        ("mine", ["torchrun", "--rdzv-id", "7"], SLURM, "mine"),
        ("", ["torchrun", "--rdzv-id", "7", "train.py"], SLURM, "7"),
        ("", ["torchrun", "--rdzv_id=7", "train.py"], {}, "7"),
        ("", ["torchrun", "--rdzv-id", "none", "train.py"], {}, ""),
        ("", ["torchrun", "train.py"], {"PET_RDZV_ID": "8"}, "8"),
        ("", ["python", "train.py"], SLURM, "42.1"),
        ("", ["python", "train.py"], {**SLURM, "SLURM_RESTART_COUNT": "2"}, "42.1.2"),
        ("", ["python", "train.py"], {"PBS_JOBID": "5.head"}, "5.head"),
        ("", ["python", "train.py"], {}, ""),
    ],
)
def test_the_nearest_name_counts(
    given: str, command: list[str], environ: dict[str, str], expected: str
) -> None:
    assert job_id(given, command, environ) == expected
