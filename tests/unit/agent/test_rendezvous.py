"""The note of a process that waits in init_process_group."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.agent.rendezvous import RendezvousNote
from ddpcheck.records.rendezvous import JOINING_FILES

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def notes(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in folder.glob(JOINING_FILES)]


def test_from_the_environment(environ: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in zip(VARIABLES, ("1", "3", "3", "host"), strict=True):
        environ.setenv(name, value)
    note = RendezvousNote(str(tmp_path))
    note.write("gloo")
    [written] = notes(tmp_path)
    assert (written["rank"], written["world_size"], written["pid"]) == (1, 3, os.getpid())
    assert written["one_host"] is True
    assert "test_rendezvous.py:" in written["where"]
    [path] = tmp_path.glob(JOINING_FILES)
    assert path.stat().st_mode & 0o077 == 0
    note.remove()
    note.remove()
    assert notes(tmp_path) == []


def test_from_the_arguments(environ: pytest.MonkeyPatch, tmp_path: Path) -> None:
    RendezvousNote(str(tmp_path)).write("gloo", "tcp://10.0.0.1:29500", rank=0, world_size=2)
    [written] = notes(tmp_path)
    assert (written["rank"], written["world_size"], written["one_host"]) == (0, 2, False)


@pytest.mark.parametrize("given", [{}, {"rank": 0}, {"rank": 0, "world_size": 1}])
def test_nothing_to_wait_for(environ: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, int]) -> None:
    RendezvousNote(str(tmp_path)).write("gloo", **given)
    assert notes(tmp_path) == []
