"""Bytes over NVLink and PCIe, by NVML's field values: counters that only grow, in units that differ."""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ddpcheck.sampling.counters import BITS, Totals
from ddpcheck.sampling.nvml_calls import Calls

_SUCCESS = 0
_UNSIGNED_INT = 1
_SENT, _RECEIVED = 0, 1  # counters of nvmlDeviceGetPcieThroughput
_KILO = 1000
_NVLINK_BYTES, _PCIE_BYTES = "NVLink bytes", "PCIe bytes"


@dataclass(frozen=True)
class _Pair:
    """Two fields, what was sent and what was received, and the bytes that one unit of them stands for."""

    sent: int
    received: int
    unit: int


# From NVLink 5 on in bytes; before that the data alone, without protocol, in KiB.
_NVLINK = (_Pair(202, 204, 1), _Pair(138, 139, 1024))
_PCIE = _Pair(197, 198, 1)


class LinkBytes:
    """Bytes by NVLink and direction since the first reading."""

    def __init__(self, nvml: ModuleType, calls: Calls, links: list[int]) -> None:
        self._nvml = nvml
        self._calls = calls
        self._links = links
        self._totals = Totals()
        self._pair: _Pair | None = None
        for pair in _NVLINK if links else ():
            answer = self._ask(pair)
            if answer is not None and all(value.nvmlReturn == _SUCCESS for value in answer):
                self._pair = pair
                return
        if links:
            calls.unsupported.add(_NVLINK_BYTES)

    def read(self) -> list[list[int]] | None:
        """Sent by each link, and received; None where the device does not count."""
        if self._pair is None:
            return None
        answer = self._ask(self._pair)
        if answer is None:
            return None
        totals = [self._pair.unit * self._total(place, value) for place, value in enumerate(answer)]
        return [totals[: len(self._links)], totals[len(self._links) :]]

    def _total(self, place: int, value: Any) -> int:
        """A link that is down answers for itself alone, and stays where it was."""
        if value.nvmlReturn != _SUCCESS:
            return self._totals.total(place)
        return self._totals.add(place, number_in(value), width_of(value))

    def _ask(self, pair: _Pair) -> Any:
        # A bare field would be that of link 0.
        fields = [(pair.sent, link) for link in self._links] + [(pair.received, link) for link in self._links]
        return self._calls.ask(_NVLINK_BYTES, self._nvml.nvmlDeviceGetFieldValues, fields)


class PcieBytes:
    """Bytes over PCIe since the first reading, or else the rate of the last 20 ms."""

    def __init__(self, nvml: ModuleType, calls: Calls) -> None:
        self._nvml = nvml
        self._calls = calls
        self._totals = Totals()
        self._counts = True

    def read(self) -> list[int] | None:
        """Sent and received; None where the device does not count."""
        if not self._counts:
            return None
        fields = [_PCIE.sent, _PCIE.received]
        answer = self._calls.ask(_PCIE_BYTES, self._nvml.nvmlDeviceGetFieldValues, fields)
        for value in answer or ():
            if value.nvmlReturn != _SUCCESS:
                self._calls.refused(_PCIE_BYTES, value.nvmlReturn, "PCIe bytes are not told")
                answer = None
                break
        if answer is None:
            self._counts = _PCIE_BYTES not in self._calls.unsupported
            return None
        return [
            self._totals.add(place, number_in(value), width_of(value)) for place, value in enumerate(answer)
        ]

    def read_rate(self) -> list[int] | None:
        """Bytes a second. Only where nothing is counted: the device measures for 20 ms while we wait."""
        if self._counts:
            return None
        rates = []
        for which in (_SENT, _RECEIVED):
            rate = self._calls.ask("PCIe throughput", self._nvml.nvmlDeviceGetPcieThroughput, which)
            if rate is None:
                return None
            rates.append(rate * _KILO)
        return rates


def number_in(value: Any) -> int:
    return int(value.value.uiVal if value.valueType == _UNSIGNED_INT else value.value.ullVal)


def width_of(value: Any) -> int:
    """In bits, at which the counter begins again."""
    return 32 if value.valueType == _UNSIGNED_INT else BITS
