"""Fixtures of the cases: those of the integration tests, and a Slurm cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.slurm import slurm_cluster, why_not
from tests.integration.conftest import ddpcheck as ddpcheck
from tests.integration.conftest import unwatched as unwatched


@pytest.fixture(scope="session")
def slurm() -> Iterator[dict[str, str]]:
    """The variables that srun, sbatch and scancel need."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with slurm_cluster() as environ:
        yield environ


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """The docstring of a case is its row in docs/schedulers.md."""
    function = getattr(item, "function", None)
    item.user_properties.append(("case", (getattr(function, "__doc__", None) or item.name).strip()))
