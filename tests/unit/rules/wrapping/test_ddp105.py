"""DDP105: modules outside of DDP that training uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpcheck.analysis.finding import Severity
from ddpcheck.records.kinds.digests import Stage
from ddpcheck.records.kinds.modules import ModuleRole, ModuleUseRecord, UseEvidence
from tests.helpers.run_builder import RunBuilder
from tests.helpers.unwrapped_run import BESIDE, HEAD, beside, step_beside

OTHER = {1: HEAD}


def used(
    folder: Path, evidence: UseEvidence | None, moves: bool = True, shape: tuple[int, ...] = (4, 4)
) -> RunBuilder:
    """Rank 1 has other values, from the beginning to the end."""
    build = beside(
        RunBuilder(folder, 3).wrap().optimizer().train(4), ModuleRole.USED, outliers=OTHER, shape=shape
    )
    for rank in build.ranks:
        build.add(rank, ModuleUseRecord(BESIDE, [evidence.value] if evidence else []))
    if moves:
        return step_beside(build, 4, outliers=OTHER, optimizer=None)
    # The digests of step -1 again, since the values have not changed.
    first = {rank: build.records[rank][-2] for rank in build.ranks}
    for rank, record in first.items():
        build.add(rank, type(record)(**{**vars(record), "stage": Stage.PARAMS.value, "step": 4}))
    return build


@pytest.mark.parametrize("evidence", [each for each in UseEvidence if each is not UseEvidence.COPIED])
def test_a_module_that_is_used_with_a_ddp_module(tmp_path: Path, evidence: UseEvidence) -> None:
    finding = used(tmp_path, evidence).end().only("DDP105")
    assert finding.severity is Severity.ERROR
    assert (finding.ranks, finding.step, finding.parameter) == ((1,), None, "Head.Head.bias")
    assert "never synchronised" in finding.cause
    assert finding.evidence["called_at"] == "/home/me/train.py:12"


def test_without_a_connection_it_is_a_note(tmp_path: Path) -> None:
    finding = used(tmp_path, None).end().findings("DDP105")[0]
    assert finding.severity is Severity.NOTE
    assert "not judged" in finding.message


def test_a_copy_that_each_rank_renews_at_its_own_time_is_a_note(tmp_path: Path) -> None:
    assert used(tmp_path, UseEvidence.COPIED).end().findings("DDP105")[0].severity is Severity.NOTE


def test_a_constant_module_is_a_warning(tmp_path: Path) -> None:
    finding = used(tmp_path, None, moves=False).end().only("DDP105")
    assert finding.severity is Severity.WARNING
    assert "stay the same" in finding.cause


def test_vectors_such_as_the_strength_of_a_noise_are_a_note(tmp_path: Path) -> None:
    build = used(tmp_path, UseEvidence.IN_LOSS, shape=(4,)).end()
    assert build.findings("DDP105")[0].severity is Severity.NOTE


def test_a_module_that_is_overwritten_later(tmp_path: Path) -> None:
    build = step_beside(used(tmp_path, UseEvidence.IN_LOSS), 8, optimizer=None)
    assert build.end().findings("DDP105") == []


def test_a_module_that_agrees(tmp_path: Path) -> None:
    build = beside(RunBuilder(tmp_path, 2).wrap().optimizer().train(4), ModuleRole.USED)
    assert step_beside(build, 4, optimizer=None).end().findings("DDP105") == []
