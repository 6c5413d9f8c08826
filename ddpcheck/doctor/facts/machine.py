"""Puts all facts of this process together; a source that fails is written down and hides no other."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddpcheck.doctor.facts.gpus import gpu_facts
from ddpcheck.doctor.facts.identity import place, rank_numbers
from ddpcheck.doctor.facts.interpreter import interpreter_facts
from ddpcheck.doctor.facts.limits import limit_facts
from ddpcheck.doctor.facts.memory import memory_facts
from ddpcheck.doctor.facts.names import name_facts
from ddpcheck.doctor.facts.processors import processor_facts
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.doctor.facts.run_folder import folder_facts
from ddpcheck.privacy import allowed_environment
from ddpcheck.sampling import interface_facts
from ddpcheck.sampling.infiniband import InfinibandPorts

Section = dict[str, Any]


def collect(
    folder: Path,
    ask_torch: Callable[[], Section],
    injection: Callable[[], Section],
    python: Callable[[], Section] = interpreter_facts,
    environ: Mapping[str, str] = os.environ,
) -> Facts:
    """The facts of this process; those of torch and of the injection come by other ways on either side."""
    numbers = rank_numbers(environ)
    return Facts(
        host=os.uname().nodename,
        place=place(),
        rank=numbers["rank"],
        world_size=numbers["world_size"],
        local_rank=numbers["local_rank"],
        local_world_size=numbers["local_world_size"],
        python=_asked(python),
        torch=_asked(ask_torch),
        names=_asked(lambda: name_facts(environ)),
        interfaces=_listed(interface_facts.describe),
        infiniband=_listed(lambda: InfinibandPorts().describe()),
        gpus=_asked(gpu_facts),
        limits=_asked(limit_facts),
        memory=_asked(memory_facts),
        processors=_asked(processor_facts),
        environment=allowed_environment(environ),
        folder=_asked(lambda: folder_facts(folder)),
        injection=_asked(injection),
    )


def _asked(source: Callable[[], Section]) -> Section:
    try:
        return source()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _listed(source: Callable[[], list[Section]]) -> list[Section]:
    try:
        return source()
    except (OSError, ValueError):
        return []
