"""Commands that start the ranks of a script."""

from __future__ import annotations

from tests.helpers.commands import BIN
from tests.helpers.fork_server import prepared
from tests.helpers.paths import ROOT

FORKER = ROOT / "tests" / "corpus" / "forker.py"


def torchrun(ranks: int, script: object, *arguments: object) -> tuple[object, ...]:
    """A new interpreter for torchrun and for each rank; importing torch takes each about two seconds."""
    return (BIN / "torchrun", "--nproc-per-node", ranks, script, *arguments)


def forked(ranks: int, script: object, *arguments: object) -> tuple[object, ...]:
    """Ranks forked from one process that has imported torch, for tests in which the launcher does not matter."""
    return prepared(FORKER, "--nproc-per-node", ranks, script, *arguments)
