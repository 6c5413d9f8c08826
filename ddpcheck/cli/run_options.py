"""What `ddpcheck run` was asked for, as the launcher receives it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ddpcheck.reports.outputs import Outputs


@dataclass(frozen=True)
class RunOptions:
    """The options of one `ddpcheck run`, already checked."""

    out: Path | None = None
    name: str | None = None
    fail_on: str = "error"
    fail_fast: bool = False
    every: int = 1
    optimizer_state: bool = False
    gradients: str = "sketch"
    save_gradients: str = ""
    sketch_every: int = 1
    quiet: bool = False
    hang_timeout: float = 300.0
    sample_hz: float = 2.0
    profile: str = ""
    # Reports beside the one on the terminal.
    outputs: Outputs = field(default_factory=Outputs)
    run_id: str = ""
    wait_nodes: float = 60.0
    # None: where the terminal and its surroundings are fit for it.
    live: bool | None = None
