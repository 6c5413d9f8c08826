"""The interpreter and those of its settings by which it would not be like others.

Standard library only, and runs as a script too: in another Python than ours, which may have no ddpcheck.
"""

from __future__ import annotations

import platform
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_FLAGS = ("isolated", "ignore_environment", "no_site", "safe_path", "optimize")


def interpreter_facts() -> dict[str, Any]:
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "executable": sys.executable,
        "flags": {name: int(getattr(sys.flags, name, 0)) for name in _FLAGS},
    }


if __name__ == "__main__":
    import json

    sys.stdout.write(json.dumps(interpreter_facts()))
