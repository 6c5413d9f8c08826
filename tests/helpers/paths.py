"""Folders and files of the checkout that tests start jobs from."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
JOBS = ROOT / "tests" / "jobs"
EXAMPLES = ROOT / "examples"
FAULTS = EXAMPLES / "faults"
TRAIN = EXAMPLES / "train.py"
