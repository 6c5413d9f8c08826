"""What one rank does: collect its facts, open a listener, meet the others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from ddpcheck.doctor.connectivity import Listener
from ddpcheck.doctor.context import DoctorContext
from ddpcheck.doctor.facts.machine import collect
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.doctor.facts.torch_build import torch_facts
from ddpcheck.doctor.interface_selection import gloo_choice
from ddpcheck.doctor.model import DoctorReport
from ddpcheck.doctor.rendezvous import meet
from ddpcheck.doctor.store_client import RendezvousFailed, open_store


def report_as_rank(folder: Path, injection: dict[str, Any], seconds: float) -> tuple[DoctorReport, bool]:
    """The report, and whether this rank is the first of its machine."""
    facts = collect(folder, torch_facts, lambda: injection)
    if facts.rank is None or facts.world_size is None:
        return DoctorReport.of(DoctorContext((facts,))), True
    listener = _listener(facts)
    if listener is not None:
        facts = replace(facts, listener=listener.described())
    try:
        return _met(facts, seconds)
    except RendezvousFailed as error:
        return _alone(facts, str(error))
    finally:
        if listener is not None:
            listener.close()


def _met(facts: Facts, seconds: float) -> tuple[DoctorReport, bool]:
    if facts.torch.get("error"):
        raise RendezvousFailed("torch cannot be imported")
    board = open_store(facts.rank or 0, seconds)
    try:
        report = meet(board, facts, seconds)
    except RuntimeError as error:  # the store went away, most often with rank 0
        raise RendezvousFailed(
            f"the store did not answer any more: {str(error).partition(chr(10))[0]}"
        ) from error
    if report is None:
        raise RendezvousFailed("rank 0 has made no report")
    first = {host.first.rank for host in report.scene.hosts}
    return report, facts.rank in first


def _alone(facts: Facts, reason: str) -> tuple[DoctorReport, bool]:
    scene = DoctorContext((facts,), facts.world_size, apart=reason)
    return DoctorReport.of(scene), not facts.local_rank


def _listener(facts: Facts) -> Listener | None:
    chosen = gloo_choice(facts)
    try:
        return None if chosen is None else Listener(chosen.address)
    except OSError:
        return None
