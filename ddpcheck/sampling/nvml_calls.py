"""Puts questions to one NVML device: what it does not support is asked once and then left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

# The answers by which a device says that it will never tell; by their numbers, which are NVML's ABI.
_INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND = 2, 3, 4, 13
_NEVER = {_INVALID_ARGUMENT, _NOT_SUPPORTED, _NO_PERMISSION, _FUNCTION_NOT_FOUND}
_LOST = {15, 16, 28}  # GPU is lost, reset required, GPU not found
# An answer such as "timeout" may be better the next time, but not for ever.
_PATIENCE = 3


class Calls:
    """All calls go through here, so that none raises and none is repeated in vain."""

    def __init__(self, nvml: ModuleType, handle: Any) -> None:
        self.handle = handle
        self.lost = ""
        self.unsupported: set[str] = set()
        self._error: type[Exception] = nvml.NVMLError
        self._failed: Counter[str] = Counter()

    def ask(self, name: str, call: Callable[..., Any], *arguments: Any) -> Any:
        """What the device answers, or None. `name` is what the answer is about."""
        if self.lost or name in self.unsupported:
            return None
        try:
            answer = call(self.handle, *arguments)
        except self._error as error:
            self.refused(name, getattr(error, "value", 0), str(error))
            return None
        self._failed.pop(name, None)
        return answer

    def refused(self, name: str, code: int, told: str) -> None:
        if code in _LOST:
            self.lost = told
            return
        self._failed[name] += 1
        if code in _NEVER or self._failed[name] >= _PATIENCE:
            self.unsupported.add(name)
