"""What the training thread waits for, where its own code proves it: a collective, the device, workers of a loader.

A rank that polls uses the processor like one that computes. The stack alone does not distinguish them, but the source
of the loop and the objects that it polls do. Called by the thread that answers the launcher, only on its request.
"""

from __future__ import annotations

import ast
import linecache
import sys
from collections.abc import Iterator
from itertools import islice
from types import FrameType
from typing import Any

from ddpcheck import torch_compat
from ddpcheck.privacy import mask_text
from ddpcheck.records.reasons import Awaited

# The method of a collective that a loop polls, and calls that a polling loop may contain besides.
_POLL = "is_completed"
_HARMLESS = frozenset({"sleep", "print"})
# Statements that may end such a loop earlier, or change what it polls.
_OTHER_WAYS_OUT = (
    ast.Break,
    ast.Return,
    ast.Raise,
    ast.Assert,
    ast.Yield,
    ast.YieldFrom,
    ast.Await,
    ast.Assign,
    ast.AnnAssign,
    ast.NamedExpr,
    ast.Delete,
    ast.With,
    ast.Try,
    ast.FunctionDef,
    ast.ClassDef,
)
_COMPREHENSIONS = ("<genexpr>", "<listcomp>")
# Calls that return when the device has finished what was enqueued before.
_DEVICE_CALLS = frozenset(
    {"item", "tolist", "cpu", "synchronize", "_cuda_synchronize", "_accelerator_synchronizeDevice"}
)
_DEVICE_CASTS = frozenset({"float", "int", "bool"})
# The functions in which a loader waits for its workers, and how many frames below them are searched.
_LOADER_FILE = "/torch/utils/data/dataloader.py"
_LOADER_WAITS = frozenset(private.name for private in torch_compat.LOADER_WAITS)
_DEEPEST = 12
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_LIBRARIES = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")
_MOST_LOOPS = 12


def awaited(frame: FrameType | None) -> list[Any]:
    """`[kind, ...]` of what the thread with this innermost frame waits for; empty where nothing proves it.

    [WORK, id], [DEVICE, call], or [LOADER, process ids of workers that owe a batch, ids of the loader's own threads].
    """
    if frame is None:
        return []
    return _workers(frame) or _polled_work(frame) or _call_in_progress(frame)


def loops_around(frame: FrameType | None) -> list[list[Any]]:
    """The loops around the calls in the user's own files, innermost first: [file, function, first line, last line].

    They show whether a rank is still in the loop in which another one trains.
    """
    loops: list[list[Any]] = []
    parsed: dict[str, list[ast.AST]] = {}
    while frame is not None and len(loops) < _MOST_LOOPS:
        code, line = frame.f_code, frame.f_lineno or 0
        file = code.co_filename
        if not any(folder in file for folder in _LIBRARIES):
            if file not in parsed:
                source = linecache.getlines(file, frame.f_globals)
                parsed[file] = [node for node in _nodes(source) if isinstance(node, (*_LOOPS, *_FUNCTIONS))]
            loops += [
                [mask_text(file), code.co_name, node.lineno, node.end_lineno or node.lineno]
                for node in _loops_at(parsed[file], code.co_firstlineno, line)
            ]
        frame = frame.f_back
    return loops[:_MOST_LOOPS]


def _loops_at(nodes: list[ast.AST], function_line: int, line: int) -> list[Any]:
    """The loops of one function around a line, innermost first. `function_line`: that of the def or a decorator."""
    around = [
        node
        for node in nodes
        if isinstance(node, (*_LOOPS, *_FUNCTIONS)) and node.lineno <= line <= (node.end_lineno or 0)
    ]
    around.sort(key=lambda node: -node.lineno)
    loops = []
    for node in around:
        if isinstance(node, _FUNCTIONS):
            break
        if node.lineno >= function_line:
            loops.append(node)
    return loops


def _workers(innermost: FrameType) -> list[Any]:
    """The workers that have not answered yet. A loader with a time limit raises an error by itself."""
    frame: FrameType | None = innermost
    for _ in range(_DEEPEST):
        if frame is None:
            return []
        code = frame.f_code
        if code.co_name in _LOADER_WAITS and code.co_filename.endswith(_LOADER_FILE):
            break
        frame = frame.f_back
    else:
        return []
    iterator = frame.f_locals.get("self")
    tasks = torch_compat.read(torch_compat.LOADER_TASKS, iterator)
    workers = torch_compat.read(torch_compat.LOADER_WORKERS, iterator)
    limit = torch_compat.read(torch_compat.LOADER_TIMEOUT, iterator, 1)
    if not isinstance(tasks, dict) or not isinstance(workers, list) or limit:
        return []
    # A task is (worker,) until its batch arrives.
    owing = {task[0] for task in list(tasks.values()) if len(task) == 1}
    pids = sorted(workers[number].pid for number in owing)
    pin = torch_compat.read(torch_compat.LOADER_PIN_THREAD, iterator)
    own = [pin.native_id] if getattr(pin, "native_id", None) else []
    return [Awaited.LOADER.value, pids, own] if pids else []


def _polled_work(innermost: FrameType) -> list[Any]:
    """A collective that has not completed, and without which the loop around this frame cannot end."""
    frame = innermost
    while frame.f_code.co_name in _COMPREHENSIONS and frame.f_back is not None:
        frame = frame.f_back
    loop = _loop_at(frame)
    if loop is None or not _only_polls(loop):
        return []
    for receiver, is_list in _receivers(loop.test):
        value = _value(receiver, frame)
        for work in list(value) if is_list and type(value) in (list, tuple) else [value]:
            if _is_pending(work):
                return [Awaited.WORK.value, id(work)]
    return []


def _is_pending(work: Any) -> bool:
    kind = getattr(sys.modules.get("torch.distributed"), "Work", None)
    return kind is not None and isinstance(work, kind) and not work.is_completed()


def _loop_at(frame: FrameType) -> ast.While | None:
    """The innermost `while` around the current line; None if it polls nothing."""
    line = frame.f_lineno or 0
    source = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    # Most files contain no such loop and are not parsed.
    if not any(_POLL in text for text in source):
        return None
    loops: ast.While | None = None
    for node in _nodes(source):
        if isinstance(node, ast.While) and node.lineno <= line <= (node.end_lineno or 0):
            loops = node if loops is None or node.lineno >= loops.lineno else loops
    # Another loop of the same function may be the inner one.
    inner = loops is not None and any(
        isinstance(node, (ast.For, ast.AsyncFor)) and node.lineno <= line <= (node.end_lineno or 0)
        for node in ast.walk(loops)
    )
    return None if inner else loops


def _nodes(source: list[str]) -> Iterator[ast.AST]:
    try:
        return ast.walk(ast.parse("".join(source)))
    except (SyntaxError, ValueError, RecursionError):
        return iter(())


def _only_polls(loop: ast.While) -> bool:
    """Whether the body does nothing that ends the loop, or that may be work."""
    for statement in [*loop.body, *loop.orelse]:
        for node in ast.walk(statement):
            if isinstance(node, _OTHER_WAYS_OUT):
                return False
            if isinstance(node, ast.Call) and _called(node) not in _HARMLESS:
                return False
    return True


def _receivers(test: ast.expr) -> list[tuple[ast.expr, bool]]:
    """The objects that must be completed before the loop ends, and whether each is a list of such objects."""
    match test:
        case ast.UnaryOp(
            op=ast.Not(), operand=ast.Call(func=ast.Attribute(value=receiver, attr="is_completed"))
        ):
            return [(receiver, False)]
        case ast.UnaryOp(
            op=ast.Not(),
            operand=ast.Call(
                func=ast.Name(id="all"),
                args=[
                    ast.GeneratorExp(
                        elt=ast.Call(func=ast.Attribute(value=ast.Name(id=each), attr="is_completed")),
                        generators=[ast.comprehension(target=ast.Name(id=target), iter=works, ifs=[])],
                    )
                ],
            ),
        ) if each == target:
            return [(works, True)]
        case ast.BoolOp(op=ast.Or(), values=values):
            return [receiver for value in values for receiver in _receivers(value)]
    return []


def _value(expression: ast.expr, frame: FrameType) -> Any:
    """The object that an expression names, without running code of the program: no property, no `__getitem__`."""
    match expression:
        case ast.Name(id=name):
            values = frame.f_locals
            return values[name] if name in values else frame.f_globals.get(name)
        case ast.Attribute(value=owner, attr=name):
            try:
                attributes = object.__getattribute__(_value(owner, frame), "__dict__")
            except AttributeError:
                return None
            return attributes.get(name) if isinstance(attributes, dict) else None
        case ast.Subscript(value=owner, slice=ast.Constant(value=key)):
            items = _value(owner, frame)
            if type(items) is dict:
                return items.get(key)
            if type(items) in (list, tuple) and isinstance(key, int) and -len(items) <= key < len(items):
                return items[key]
    return None


def _call_in_progress(frame: FrameType) -> list[Any]:
    """The call in progress, if it waits for a collective or for the device. Positions are known since Python 3.11."""
    position = _position(frame)
    if position is None:
        return []
    end_line, end_column = position
    source = linecache.getlines(frame.f_code.co_filename, frame.f_globals)
    text = source[end_line - 1].encode()[:end_column] if end_line <= len(source) else b""
    # A cheap test before the file is parsed.
    if not text.endswith(b")"):
        return []
    for node in _nodes(source):
        if isinstance(node, ast.Call) and (node.end_lineno, node.end_col_offset) == position:
            name = _called(node)
            if isinstance(node.func, ast.Attribute) and name == "wait":
                work = _value(node.func.value, frame)
                return [Awaited.WORK.value, id(work)] if _is_pending(work) else []
            if name in (_DEVICE_CALLS if isinstance(node.func, ast.Attribute) else _DEVICE_CASTS):
                return [Awaited.DEVICE.value, name]
    return []


def _position(frame: FrameType) -> tuple[int, int] | None:
    """Line and column at which the expression of the current instruction ends."""
    positions = getattr(frame.f_code, "co_positions", None)
    if positions is None or frame.f_lasti < 0:
        return None
    # Instructions have two bytes.
    position = next(islice(positions(), frame.f_lasti // 2, None), None)
    if position is None or position[1] is None or position[3] is None:
        return None
    return position[1], position[3]


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return str(name)
    return ""
