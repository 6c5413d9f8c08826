"""Backends by the names that torch and its successors give them."""

from __future__ import annotations

import re

import pytest

from ddpcheck.records.backend_names import backend_on, is_gloo, is_nccl
from tests.helpers.paths import ROOT


@pytest.mark.parametrize(
    ("config", "device", "backend"),
    [
        ("nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:nccl", "cuda", "nccl"),
        ("cpu:gloo,cuda:nccl", "cpu", "gloo"),
        ("cpu:gloo,cuda:nccl2", "cuda", "nccl2"),
        ("cuda:ncclx", "cuda", "ncclx"),
        ("cuda:ncclx", "cpu", ""),
        ("cpu:gloo,cuda:gloo,mps:gloo", "cuda", "gloo"),
        ("undefined", "cuda", ""),
    ],
)
def test_the_backend_of_a_device_type(config: str, device: str, backend: str) -> None:
    assert backend_on(config, device) == backend


@pytest.mark.parametrize(
    "name", ["nccl", "nccl2", "nccl-legacy", "ncclx", "cuda:ncclx", "NCCL", "rccl", "xccl", "hccl"]
)
def test_kernels_that_wait_for_each_other(name: str) -> None:
    assert is_nccl(name)
    assert not is_gloo(name)


@pytest.mark.parametrize("name", ["gloo", "cpu:gloo", "mpi", "ucc", "fake", "undefined", ""])
def test_other_backends(name: str) -> None:
    assert not is_nccl(name)
    assert is_gloo(name) == ("gloo" in name)


def test_no_backend_is_compared_for_equality() -> None:
    """A new name of a backend must not switch a check off."""
    equality = re.compile(
        r"[=!]= *[\"'](gloo|nccl|rccl|xccl|undefined)|[\"'](gloo|nccl|rccl|xccl)[\"'] *[=!]="
    )
    files = [
        path for room in ("ddpcheck", "probes", "reports") for path in sorted((ROOT / room).rglob("*.py"))
    ]
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if equality.search(line)
    ]
    assert found == []
