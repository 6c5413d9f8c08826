"""One rank of a test: imports the test function and calls it. Standard library only."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def main(call: dict[str, Any]) -> None:
    """Call the function with the module search path of the test process."""
    sys.path[:] = [*sys.path, *(entry for entry in call["path"] if entry not in sys.path)]
    module = _module(call["module"], Path(call["file"]))
    getattr(module, call["function"])(*call["arguments"], **call["keywords"])


def _module(name: str, file: Path) -> ModuleType:
    """Import by name if that leads to the file, otherwise from the file."""
    try:
        by_name = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        by_name = None
    if by_name is not None and by_name.origin and Path(by_name.origin).resolve() == file.resolve():
        return importlib.import_module(name)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be imported")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
