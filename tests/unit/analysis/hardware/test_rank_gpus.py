"""GPUs of ranks by UUID and PCI id: the process ids of NVML are those of the host."""

from __future__ import annotations

import pytest

from ddpcheck.analysis.hardware.rank_gpus import (
    GpuMatch,
    MatchedBy,
    match_gpu,
    normalized_pci,
    normalized_uuid,
)
from ddpcheck.analysis.hardware.samples import GpuFacts
from ddpcheck.records.kinds.rank import DeviceRecord

UUIDS = [f"{index}a1b2c3d-1111-2222-3333-444455556666" for index in range(4)]
GPUS = [
    GpuFacts(0, uuid=f"GPU-{UUIDS[0].upper()}", bus="00000000:3B:00.0"),
    GpuFacts(1, uuid=f"GPU-{UUIDS[1]}", bus="00000000:5E:00.0"),
    GpuFacts(
        2, uuid=f"GPU-{UUIDS[2]}", bus="00000001:5E:00.0", mig=((f"MIG-{UUIDS[3]}", None), ("MIG-ffff", None))
    ),
]


def device(uuid: str = "", pci: str = "") -> DeviceRecord:
    return DeviceRecord(0, "cuda:0", uuid=uuid, pci=pci)


def test_by_uuid() -> None:
    assert match_gpu(device(UUIDS[0]), GPUS) == GpuMatch(0, MatchedBy.UUID)
    # The UUID decides, whatever the PCI id says.
    assert match_gpu(device(UUIDS[1], "0000:3b:00.0"), GPUS) == GpuMatch(1, MatchedBy.UUID)


def test_a_slice_by_its_own_uuid() -> None:
    assert match_gpu(device(UUIDS[3], "0001:5e:00.0"), GPUS) == GpuMatch(2, MatchedBy.UUID, 0)
    assert match_gpu(device("ffff"), GPUS) == GpuMatch(2, MatchedBy.UUID, 1)


def test_by_pci_id_where_the_uuids_are_of_another_kind() -> None:
    """As on ROCm. The domain counts: two GPUs have the same bus."""
    assert match_gpu(device("38613965", "0001:5e:00.0"), GPUS) == GpuMatch(2, MatchedBy.PCI)
    assert match_gpu(device(pci="0000:5e:00.0"), GPUS) == GpuMatch(1, MatchedBy.PCI)


def test_partitions_that_share_a_bus_are_not_guessed() -> None:
    partitions = [GpuFacts(number, bus=f"0000:0c:00.{number}") for number in range(2)]
    assert match_gpu(device(pci="0000:0c:00.0"), partitions) is None


@pytest.mark.parametrize("record", [device(), device("99"), device(pci="0000:77:00.0"), device(pci="none")])
def test_no_match(record: DeviceRecord) -> None:
    assert match_gpu(record, GPUS) is None


def test_forms_of_identifiers() -> None:
    assert normalized_uuid(f"MIG-GPU-{UUIDS[0]}/1/0") == UUIDS[0]
    assert normalized_pci("00000000:3B:00.0") == normalized_pci("0000:3b:00.0") == normalized_pci("3b:00.0")
