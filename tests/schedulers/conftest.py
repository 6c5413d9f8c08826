"""Fixtures of the cases: those of the integration tests, and a Slurm cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterator

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


@pytest.fixture(autouse=True)
def _titled(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> None:
    """The docstring of a case is its row in docs/schedulers.md."""
    record_property("case", (request.function.__doc__ or request.node.name).strip())
