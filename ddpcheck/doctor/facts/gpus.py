"""GPUs of the machine through NVML, and which of them this process would see."""

from __future__ import annotations

from typing import Any

from ddpcheck.sampling.nvml import Gpus


def gpu_facts() -> dict[str, Any]:
    """What they are, how they are connected, and what they do at this moment."""
    gpus = Gpus()
    gpus.open()
    try:
        now = gpus.read()
        return {**gpus.describe(), "now": now}
    finally:
        gpus.close()
