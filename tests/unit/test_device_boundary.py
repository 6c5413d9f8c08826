"""Only `ddpcheck/device_api.py` knows the API of a device: no other file mentions it, except in texts for users."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

TYPES = "cuda|xpu|npu|hpu|mps|mtia|accelerator|musa"
DEVICE_API = re.compile(
    rf"\btorch\.({TYPES})\b|\.is_({TYPES}|privateuseone)\b|\.cuda\(|[=!]= *[\"'](cuda|xpu|npu)[\"']"
    # By a name that is only known at run time.
    r"|getattr\(torch, *([\"'](cuda|xpu|accelerator)|[\w.]*(kind|device|type)\b)|get_device_module"
)
BOUNDARY = "ddpcheck/device_api.py"
# These run in a Python without ddpcheck, or as a job that ddpcheck watches.
STANDALONE = {"ddpcheck/doctor/facts/torch_build.py", "ddpcheck/selftest/job.py"}
# Sentences that advise users what to write in their own scripts, by file.
USER_TEXTS = {
    "ddpcheck/doctor/checks/gpus.py": {"`torch.cuda.set_device(LOCAL_RANK)`.", "`.cuda()`"},
    "ddpcheck/doctor/checks/python.py": {"`.cuda()`"},
    "ddpcheck/rules/memory/ddp501.py": {"torch.cuda.set_device"},
}


def sources() -> list[Path]:
    files = [
        path for room in ("ddpcheck", "probes", "reports") for path in sorted((ROOT / room).rglob("*.py"))
    ]
    # Both rooms are also visible in the package, by symlinks.
    return [path for path in files if path.resolve() == path]


def mentions(text: str) -> list[tuple[int, str]]:
    return [(number, line) for number, line in enumerate(text.splitlines(), 1) if DEVICE_API.search(line)]


def in_strings(text: str) -> set[int]:
    """The lines of string constants that are no docstrings of code: texts for users."""
    lines: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def unexpected(name: str, text: str) -> list[str]:
    allowed, strings = USER_TEXTS.get(name, set()), in_strings(text)
    return [
        f"{name}:{number}: {line.strip()}"
        for number, line in mentions(text)
        if not (number in strings and any(phrase in line for phrase in allowed))
    ]


def test_only_one_module_mentions_the_device_api() -> None:
    found = []
    for path in sources():
        name = path.relative_to(ROOT).as_posix()
        if name != BOUNDARY and name not in STANDALONE:
            found += unexpected(name, path.read_text())
    assert found == []


def test_every_allowed_text_is_still_there() -> None:
    for name, phrases in USER_TEXTS.items():
        text = (ROOT / name).read_text()
        assert all(phrase in text for phrase in phrases), name


@pytest.mark.parametrize(
    "line",
    [
        "torch.cuda.synchronize()",
        "on_gpu = tensor.is_cuda",
        "torch.xpu.Stream()",
        "torch.accelerator.current_stream()",
        'on_gpu = device.type == "cuda"',
        "model.cuda()",
        'getattr(getattr(torch, tensor.device.type, None), "synchronize", None)()',
    ],
)
def test_a_call_is_found_also_in_a_file_with_texts(line: str) -> None:
    assert unexpected("ddpcheck/rules/memory/ddp501.py", f"\n{line}\n")


def test_a_standalone_file_imports_nothing_of_ddpcheck() -> None:
    for name in STANDALONE:
        assert not re.search(r"^\s*(from|import) ddpcheck", (ROOT / name).read_text(), re.MULTILINE), name


def test_the_boundary_itself_is_found() -> None:
    assert mentions((ROOT / BOUNDARY).read_text())
