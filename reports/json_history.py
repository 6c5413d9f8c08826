"""The keys `agreement`, `gradients` and `environment` of report.json, read back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from ddpcheck.analysis.timeseries.model import (
    AgreementHistory,
    AgreementInterval,
    EnvironmentRow,
    EnvironmentValue,
    GradientHistory,
)


def agreement_from(raw: Iterable[Mapping[str, Any]]) -> tuple[AgreementHistory, ...]:
    return tuple(
        AgreementHistory(**{**_known(AgreementHistory, item), "stretches": _stretches(item["stretches"])})
        for item in raw
    )


def gradients_from(raw: Iterable[Mapping[str, Any]]) -> tuple[GradientHistory, ...]:
    return tuple(
        GradientHistory(
            **{
                **_known(GradientHistory, item),
                "local": {rank: tuple(norms) for rank, norms in item["local"].items()},
            }
        )
        for item in raw
    )


def environment_from(raw: Iterable[Mapping[str, Any]]) -> tuple[EnvironmentRow, ...]:
    return tuple(
        EnvironmentRow(
            item["name"],
            tuple(EnvironmentValue(**_known(EnvironmentValue, one)) for one in item["values"]),
        )
        for item in raw
    )


def _stretches(raw: Iterable[Mapping[str, Any]]) -> tuple[AgreementInterval, ...]:
    return tuple(AgreementInterval(**_known(AgreementInterval, item)) for item in raw)


def _known(kind: type, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Lists come back as the tuples they were."""
    names = {field.name for field in fields(kind)}
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in raw.items() if key in names
    }
