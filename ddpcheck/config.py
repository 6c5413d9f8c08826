"""What `ddpcheck run` was asked to do, handed to the ranks through one environment variable.

Standard library only: this is imported inside ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

ENV_CONFIG = "DDPCHECK_CONFIG"


@dataclass(frozen=True)
class Config:
    """Settings of one run, the same on every rank."""

    run_dir: str
    run_id: str
    every: int = 1
    optimizer_state: bool = False
    # off, sketch, or full: every gradient of every step is kept.
    gradients: str = "sketch"
    # After the first steps gradients are sketched at every so many steps; what is applied is digested at all.
    sketch_every: int = 1
    # Steps whose gradients are kept whole, as in "10:13".
    save_gradients: str = ""
    # Ranks that see a disagreement hold still for a moment, so that the job can be stopped within that step.
    fail_fast: bool = False
    # Node-local file through which ranks of one node see each other's digests; empty: none could be made.
    board: str = ""
    # Steps that torch.profiler records, as in "5:8"; empty: none.
    profile: str = ""
    # Seconds without progress after which the launcher looks for a hang; 0: never.
    hang_timeout: float = 300.0

    @property
    def listen_seconds(self) -> float:
        """How often a rank looks whether the launcher asks where it stands."""
        return min(5.0, max(0.1, self.hang_timeout / 20))

    def to_environment(self) -> dict[str, str]:
        return {ENV_CONFIG: json.dumps(asdict(self), separators=(",", ":"))}

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Config | None:
        """The configuration in `environ`, or None where this process is not being watched.

        Unknown keys are left out, so that ranks with another version of ddpcheck still report.
        """
        text = environ.get(ENV_CONFIG)
        if not text:
            return None
        raw = json.loads(text)
        known = {field.name for field in fields(cls)}
        return cls(**{key: value for key, value in raw.items() if key in known})
