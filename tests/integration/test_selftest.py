"""`ddpcheck selftest` on this machine, as a whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_the_whole_selftest(tmp_path: Path) -> None:
    page, kept = tmp_path / "page.txt", tmp_path / "kept"
    command = [
        sys.executable,
        "-m",
        "ddpcheck",
        "selftest",
        "--json",
        "--out",
        str(page),
        "--keep",
        str(kept),
    ]
    done = subprocess.run(
        [*command, "--blocks", "2", "--steps", "6"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert (report["schema"], report["verdict"], report["disagreements"]) == (1, "ok", [])
    assert report["environment"]["torch"]
    kernels = {each["name"]: each for each in report["kernels"]}
    compared = [each for each in kernels.values() if not each["missing"]]
    assert compared
    assert all(each["tensors"] >= 20 and not each["differences"] for each in compared)
    assert report["weights"]["differing"] == []
    assert (report["weights"]["ranks"] >= 2, report["weights"]["steps"], report["weights"]["tensors"]) == (
        True,
        15,
        26,
    )
    assert (len(report["cost"]["plain"]), len(report["cost"]["watched"])) == (2, 2)
    assert report["cost"]["ratio"] > 0
    assert report["cost"]["own_us"] > 0
    # The watched job was really watched.
    watched = json.loads((kept / "watched" / "run" / "report.json").read_text())
    assert (watched["verdict"], watched["steps"]) == ("ok", 15)
    assert not (kept / "plain" / "run").exists()
    text = page.read_text()
    assert text.startswith("ddpcheck ")
    assert "bit-identical with and without ddpcheck" in text
    if not report["device"]:
        assert "no device was there" in text
    # Progress goes to the other stream.
    assert "comparing kernels" in done.stderr


def test_wrong_usage() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ddpcheck", "selftest", "--ranks", "1"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "give 2 to 64 ranks" in done.stderr
