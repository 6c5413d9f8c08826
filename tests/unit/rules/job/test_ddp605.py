"""DDP605: ddpcheck disabled one of its probes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ddpcheck.records.kinds.rank import FaultRecord
from ddpcheck.records.reasons import KERNEL_PROBE, NO_EXCHANGE, KernelLoss, NoHangWatch
from ddpcheck.records.registry import to_line
from tests.helpers.run_builder import RunBuilder

FAULT = FaultRecord("parameters", "after_step", "ValueError: no", "x.py:3")


@pytest.mark.parametrize(("world_size", "ranks"), [(2, (0, 1)), (4, (0, 3))])
def test_the_same_fault_on_several_ranks_is_one_finding(
    tmp_path: Path, world_size: int, ranks: tuple[int, ...]
) -> None:
    build = RunBuilder(tmp_path, world_size).wrap()
    for rank in ranks:
        build.add(rank, FAULT)
    (finding,) = build.end().findings()
    assert (finding.code, finding.severity.value, finding.ranks) == ("DDP605", "warning", ranks)
    assert "parameters.after_step failed" in finding.message
    assert "parameters after wrapping and after each step" in finding.evidence["lost_checks"]
    report = build.report()
    assert report.coverage is not None
    assert (report.verdict.value, report.coverage.gap, report.coverage.ranks) == (
        "incomplete",
        "check_lost",
        ranks,
    )
    assert "ValueError: no" in finding.message


def test_the_loss_of_another_probe_leaves_the_comparison_complete(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().optimizer().train(3)
    build.add(0, FaultRecord("memory", "after_step", "ValueError: no", "x.py:3"))
    report = build.covered().end().report()
    assert [finding.severity.value for finding in report.findings] == ["note"]
    assert report.verdict.value == "ok"


def test_different_faults_are_different_findings(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap()
    build.add(0, FAULT)
    build.add(0, FaultRecord("structure", "forward", "KeyError: 'x'", "y.py:1"))
    assert len(build.end().findings("DDP605")) == 2


def test_missing_torch_name_has_its_own_wording(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap()
    error = "torch 9.9 has no torch.Tensor._indices: sparse tensors are not compared"
    for rank in (0, 1):
        build.add(rank, FaultRecord("torch_compat", "_indices", error, ""))
    (finding,) = build.end().findings()
    assert (finding.code, finding.severity.value, finding.ranks) == ("DDP605", "note", (0, 1))
    assert finding.message.startswith(
        "This version of torch has no torch.Tensor._indices: sparse tensors are not compared. "
    )
    assert finding.evidence["entry"] == "torch_compat._indices"


@pytest.mark.parametrize("loss", list(KernelLoss))
def test_a_device_without_a_kernel_is_a_warning_with_its_reason(tmp_path: Path, loss: KernelLoss) -> None:
    build = RunBuilder(tmp_path, 2).wrap()
    for rank in (0, 1):
        build.add(rank, FaultRecord(KERNEL_PROBE, loss.value, "cuda: RuntimeError: the reason", ""))
    (finding,) = build.end().findings()
    assert (finding.code, finding.severity.value, finding.ranks) == ("DDP605", "warning", (0, 1))
    assert "RuntimeError: the reason" in finding.message
    assert "at most 5 % of a step" in finding.message
    assert finding.cause
    assert finding.fix


def test_a_process_that_never_became_a_rank(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().end()
    build.save()
    (tmp_path / "fault-77.jsonl").write_bytes(
        to_line(FaultRecord("bootstrap", "install", "OSError: x", "", 77))
    )
    from ddpcheck.analysis.report_builder import analyse_run

    (finding,) = analyse_run(tmp_path).findings
    assert (finding.code, finding.ranks) == ("DDP605", ())
    assert "bootstrap.install" in finding.message


def test_a_rank_that_could_not_write(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().end()
    build.notes.append({"kind": "trouble", "rank": 1, "text": "No space left on device (/x)"})
    (finding,) = build.findings()
    assert (finding.code, finding.ranks) == ("DDP605", (1,))
    assert "No space left on device" in finding.message


def trouble(pid: int) -> dict[str, object]:
    return {"kind": "trouble", "rank": 1, "pid": pid, "host": "node0", "text": "File too large (/x)"}


def test_a_rank_that_could_not_write_did_not_die(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().end([0])
    build.exited(0, 2000.0, 0).exited(1, 2000.0, 0)
    build.notes.append(trouble(101))
    (finding,) = build.findings()
    assert (finding.code, finding.ranks) == ("DDP605", (1,))
    # Another process with that rank had the write error: it does not explain this exit.
    build.notes[-1] = trouble(555)
    assert [results.code for results in build.findings() if results.severity.value == "error"] == ["DDP602"]


def test_a_rank_that_could_not_write_at_all_is_not_reported_as_missing(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 3).wrap().end()
    del build.records[1]
    build.notes.append(trouble(101))
    (finding,) = build.findings()
    assert (finding.code, finding.ranks) == ("DDP605", (1,))
    assert "could not write any record" in finding.message
    assert build.report().verdict.value == "incomplete"


def test_no_rank_could_write(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2)
    build.records.clear()
    build.notes.append(trouble(101))
    assert [finding.code for finding in build.findings()] == ["DDP605"]


def test_no_fault(tmp_path: Path) -> None:
    assert RunBuilder(tmp_path, 2).wrap().end().findings("DDP605") == []


def test_a_launcher_that_stopped_sampling(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().train(2).end()
    build.notes.append({"kind": "fault", "probe": "sampler", "entry": "sample", "error": "OSError: no"})
    [finding] = build.findings("DDP605")
    assert (finding.severity.value, finding.ranks) == ("note", ())
    assert finding.message.startswith("Sampling the node failed: OSError: no. The job was not affected; ")


def test_a_source_that_could_not_be_sampled_on_several_hosts(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().train(2).end()
    for host in ("node1", "node0", "node1"):
        build.notes.append(
            {"kind": "fault", "probe": "sampler", "entry": "gpus", "host": host, "error": "ValueError: x"}
        )
    [finding] = build.findings("DDP605")
    assert finding.message.startswith("Sampling gpus failed on node0, node1: ValueError: x. ")
    assert "other samples continued" in finding.message
    assert finding.evidence["entry"] == "sampler.gpus"


def test_a_log_that_could_not_be_written(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().train(2).end()
    build.description["unwritten"] = 17
    [finding] = build.findings("DDP605")
    assert (finding.severity.value, finding.ranks) == ("note", ())
    assert finding.message.startswith("17 lines of the node log could not be written")


def test_ranks_that_share_no_memory_with_their_launcher(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 2).wrap().optimizer().train(3)
    for rank in (0, 1):
        build.add(rank, FaultRecord(NO_EXCHANGE, "open", "FileNotFoundError: no", ""))
    report = build.covered().end().report()
    [finding] = report.findings
    assert (finding.code, finding.severity.value, finding.ranks) == ("DDP605", "note", (0, 1))
    assert finding.evidence["why"] == NoHangWatch.NO_MEMORY.value
    assert "Hangs of these ranks are not detected" in finding.message
    assert report.verdict.value == "ok"


@pytest.mark.parametrize("why", list(NoHangWatch))
def test_hangs_that_a_launcher_cannot_detect(tmp_path: Path, why: NoHangWatch) -> None:
    build = RunBuilder(tmp_path, 2).wrap().end()
    build.notes.append({"kind": "no_hang_watch", "why": why.value, "ranks": [1]})
    [finding] = build.findings("DDP605")
    assert (finding.severity.value, finding.ranks, finding.evidence["why"]) == ("note", (1,), why.value)


@pytest.mark.parametrize(
    ("torch", "python", "reported"),
    [
        ("2.3.1+cu121", "3.11.7", True),
        ("2.4.0", "3.11.7", False),
        ("2.13.0", "3.14.0t", True),
        ("3.0.0a0+git", "3.14.0", False),
    ],
)
def test_versions_that_were_not_tested(tmp_path: Path, torch: str, python: str, reported: bool) -> None:
    build = RunBuilder(tmp_path, 2).wrap()
    for rank in (0, 1):
        build.records[rank][0] = replace(build.records[rank][0], torch=torch, python=python)
    found = build.end().findings("DDP605")
    assert [finding.ranks for finding in found] == [(0, 1)] * reported
