"""Tests that need something from the machine say how to get it, and fail in CI if it is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.helpers.commands import BIN, environment
from tests.helpers.paths import ROOT

TESTS = "tests/integration/test_page_in_browser.py"


@pytest.mark.parametrize(("require_all", "status", "outcome"), [("", 0, "1 skipped"), ("1", 1, "1 error")])
def test_a_machine_without_chromium(require_all: str, status: int, outcome: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "security_policy", TESTS],
        cwd=ROOT,
        env=environment(PATH=str(BIN), DDPCHECK_REQUIRE_ALL=require_all),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == status, done.stdout
    assert "apt-get install chromium" in done.stdout
    assert outcome in done.stdout
