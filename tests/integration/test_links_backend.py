"""`ddpcheck links` with a backend that torch does not have: one sentence, no traceback of the launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.commands import BIN, run_command

pytestmark = pytest.mark.slow


def test_a_backend_that_torch_does_not_have(tmp_path: Path) -> None:
    launcher = ["env", "RANK=0", "WORLD_SIZE=1", "MASTER_ADDR=127.0.0.1", "MASTER_PORT=29403"]
    command = [
        BIN / "ddpcheck",
        "links",
        "--out",
        tmp_path / "links.json",
        "--backend",
        "mpi",
        "--",
        *launcher,
    ]
    done = run_command(command, tmp_path, {}, timeout=300)
    assert done.status == 2
    assert "the backend 'mpi' cannot be used here" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
