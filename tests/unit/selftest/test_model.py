"""The verdict and the page of a self-test."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from ddpcheck.reports.terminal.selftest import progress_on, render
from ddpcheck.selftest.model import CostResult, SelftestReport, WeightsResult, as_text

KERNEL = {
    "name": "triton kernel",
    "device": "cuda:0",
    "tensors": 100,
    "seconds": 1.0,
    "differences": [],
    "missing": "",
}
ENVIRONMENT = {
    "python": "3.11",
    "torch": "2.13.0",
    "cuda": "13.0",
    "rocm": "",
    "nccl": "2.29.1",
    "triton": "3.9.0",
}
GOOD = SelftestReport(
    "2026-11-18 12:00:00",
    "node0",
    {**ENVIRONMENT, "device_type": "cuda", "devices": ["NVIDIA H100"] * 8},
    {"driver": "580.1", "gpus": [{}] * 8, "topology": [["X", "NV18"], ["NV18", "X"]]},
    [{**KERNEL, "gigabytes_per_second": 1500.0}],
    WeightsResult(8, 147, 26),
    CostResult(24, (1.0, 1.2, 1.1), (1.01, 1.212, 1.111), 120.0, 300.0),
    "ok",
)


def test_everything_agrees() -> None:
    assert (GOOD.status, GOOD.disagreements) == (0, [])
    text = as_text(GOOD)
    assert "All parts agree, on 8 x NVIDIA H100." in text
    assert "driver 580.1, 8 GPUs, connected by NV18" in text
    assert "torch 2.13.0, CUDA 13.0, NCCL 2.29.1, Triton 3.9.0" in text
    assert "equal to operators of torch on the CPU, 100 tensors, 1500 GB/s" in text
    assert "bit-identical with and without ddpcheck: 8 ranks, 147 steps, 26 tensors" in text
    assert (
        "with ddpcheck / without: 1.010 (+458 us on 45,833 us per step; medians of 3 blocks of 24 steps"
        in text
    )
    assert "120 us per step in the training thread, 300 us on the device" in text
    assert max(map(len, text.splitlines())) <= 160


def test_without_a_device_the_page_says_so() -> None:
    report = replace(
        GOOD, environment={**ENVIRONMENT, "device_type": "cpu", "devices": []}, gpus={"note": "no driver"}
    )
    assert report.status == 0
    assert "no device was there" in as_text(report)
    assert json.loads(report.to_json())["device"] is False


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        (replace(GOOD, kernels=[{**KERNEL, "differences": ["digest of x"]}]), "differs from the reference"),
        (
            replace(GOOD, kernels=[{**KERNEL, "missing": "no_compiler: gcc"}]),
            "No kernel on cuda:0: no_compiler: gcc",
        ),
        (
            replace(GOOD, weights=WeightsResult(2, 9, 4, ("rank 1: a",), True)),
            "weights differ with and without",
        ),
        (replace(GOOD, weights=WeightsResult(2, 9, 4, ("rank 1: a",), False)), "nothing can be concluded"),
        (replace(GOOD, weights=WeightsResult(0, 0, 0, error="status 1")), "The job did not run: status 1"),
        (replace(GOOD, findings=("error DDP201: x",)), "on a healthy job: error DDP201: x"),
        (replace(GOOD, errors=("The kernels could not be compared: y",)), "could not be compared: y"),
    ],
)
def test_what_does_not_agree(report: SelftestReport, sentence: str) -> None:
    assert report.status == 10
    [found] = report.disagreements
    assert sentence in found
    assert sentence in as_text(report)
    assert json.loads(report.to_json())["verdict"] == "different"


def test_what_the_cpu_lacks_is_no_disagreement() -> None:
    missing = {**KERNEL, "device": "cpu", "missing": "No module named 'triton'"}
    report = replace(GOOD, kernels=[missing], findings=("note DDP404: z",))
    assert report.status == 0
    assert "not there (No module named 'triton')" in as_text(report)


def test_colours_only_on_a_terminal() -> None:
    plain, terminal = io.StringIO(), io.StringIO()
    render(GOOD, Console(file=plain))
    assert plain.getvalue() == as_text(GOOD)
    render(GOOD, Console(file=terminal, force_terminal=True, width=100))
    assert "\x1b[" in terminal.getvalue()
    assert "\x1b[" not in plain.getvalue()


def test_progress_is_a_line_per_part_where_there_is_no_terminal() -> None:
    stream = io.StringIO()
    with progress_on(Console(file=stream)) as progress:
        progress("comparing kernels")
    assert stream.getvalue() == "ddpcheck selftest: comparing kernels\n"
