"""`make schedulers`: installs Slurm, OpenMPI, Ray and podman in a copy of this machine, and runs their cases there.

    python -m tests.schedulers                        all cases, and the table of docs/schedulers.md
    python -m tests.schedulers ray_cases.py           one file; the table keeps the other rows
    python -m tests.schedulers -k requeued            some of them; further arguments are those of pytest
    python -m tests.schedulers --install              only install

Needs root. The copy is an overlay in build/schedulers; remove that folder to begin anew.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.schedulers.document import PAGE, read_outcomes, update
from tests.schedulers.machine import CannotCopy, copy_machine, enter_namespaces

ROOT = Path(__file__).parents[2]
CASES = ("slurm_cases.py", "mpirun_cases.py", "ray_cases.py", "container_cases.py")


def main(arguments: list[str]) -> int:
    try:
        enter_namespaces(["-m", "tests.schedulers", *arguments])
        machine = copy_machine(ROOT / "build" / "schedulers", ROOT)
    except CannotCopy as error:
        print(error)
        return 1
    python = sys.executable
    machine.run([python, "-m", "tests.schedulers.install"], ROOT)
    if arguments == ["--install"]:
        return 0
    chosen = [name for name in arguments if name in CASES]
    files = [f"tests/schedulers/{name}" for name in chosen or CASES]
    options = [word for word in arguments if word not in chosen]
    results = "/tmp/results.xml"
    # The format that keeps the titles of cases.
    junit = ["-o", "junit_family=xunit1", f"--junitxml={results}"]
    pytest = [python, "-m", "pytest", "-v", "-p", "no:cacheprovider", *junit, "--durations=30"]
    status = machine.run([*pytest, *files, *options], ROOT).returncode
    outcomes = read_outcomes(machine.root / results.lstrip("/"))
    PAGE.write_text(update(PAGE.read_text(encoding="utf-8"), outcomes), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
