"""The notes of processes that wait in `init_process_group`."""

from __future__ import annotations

# One for each such process, by host and process id.
JOINING_FILES = "joining-*.json"
