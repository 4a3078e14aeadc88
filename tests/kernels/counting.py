"""How often a micro-batch calls cupy and pylibcudf, how often it waits for the card, and how many bytes it touches.

On a card each call costs the host some microseconds, however few rows it has, and a wait lets the card run dry: below
some hundred thousand changes that is what a micro-batch costs. Counted on the stand-ins:

    PYTHONPATH=tests python -m kernels.counting [--changes 100000] [--emit per_batch] [--mix changes]
    PYTHONPATH=tests python -m kernels.counting --changes 1000 --operator "ASOF join, per_event"
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpu_ops
from benchmarks.gpu.feed import Feed, description
from benchmarks.gpu.operators import OPERATORS
from gpu_ops.join_engine import JoinEngine
from kernels.emulated_cupy import Event, RawKernel, Runtime, ndarray
from kernels.emulated_libcudf import Column, Table
from kernels.emulation import emulated

_BATCHES = 6
_PACK = str(Path(gpu_ops.__file__).parent)
_LIBCUDF = ("copying", "concatenate", "binaryop", "hashing", "join", "reduce", "transform", "unary")
_WAITS = {
    "cp.compress",
    "cp.flatnonzero",
    "cp.asnumpy",
    "cp.unique",
    "column.to_arrow",
    "cp.Event.synchronize",
    "plc.bools_to_mask",
    "plc.inner_join",
}
"""The host learns a size, a value or a number of nulls.

Not ``cp.asarray``: cupy copies a host array by page-locked memory of its own, and goes on (``_send_object_to_gpu`` in
its ``core.pyx``).
"""


@dataclasses.dataclass
class Calls:
    """By place (file, function) and name of the call."""

    calls: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    bytes: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    waits: Counter[str] = dataclasses.field(default_factory=Counter)
    on: bool = True

    def note(self, name: str, moved: int, *, wait: bool = False) -> None:
        place = _place()
        if wait:
            self.waits[place] += 1
        if not name.startswith("."):
            self.calls[place, name] += 1
        self.bytes[place, name] += moved


def _place() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None and not frame.f_code.co_filename.startswith(_PACK):
        frame = frame.f_back
    if frame is None:
        return "elsewhere"
    code = frame.f_code
    return f"{Path(code.co_filename).relative_to(_PACK)}:{code.co_firstlineno} {code.co_name}"


def _size(value: Any) -> int:
    if isinstance(value, ndarray):
        return value.nbytes
    if isinstance(value, Column):
        return value.array.nbytes
    if isinstance(value, Table):
        return sum(_size(column) for column in value.columns())
    return sum(_size(v) for v in value) if isinstance(value, (tuple, list)) else 0


@contextlib.contextmanager
def counting() -> Iterator[Calls]:
    """Counts within; the emulation is on already."""
    found, inside = Calls(), [False]

    def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counts(*args: Any, **options: Any) -> Any:
            if inside[0] or not found.on:
                return call(*args, **options)
            inside[0] = True
            try:
                result = call(*args, **options)
            finally:
                inside[0] = False
            # out of bounds becomes null, and nulls are counted
            waits = name in _WAITS or (name == "plc.gather" and args[2].name == "NULLIFY")
            found.note(name, _size(list(args)) + _size(list(options.values())) + _size(result), wait=waits)
            return result

        return counts

    def indexed(self: Any, index: Any, own: Any = ndarray.__getitem__) -> Any:
        result = own(self, index)
        if isinstance(index, np.ndarray) and found.on and not inside[0]:
            found.note("array[array]", 2 * result.nbytes + index.nbytes, wait=index.dtype == bool)
        return result

    def assigned(self: Any, index: Any, value: Any, own: Any = ndarray.__setitem__) -> None:
        own(self, index, value)
        if found.on and not inside[0]:
            found.note("array[] =", 2 * _size(value) + (index.nbytes if isinstance(index, np.ndarray) else 0))

    def copied(self: Any, to: int, source: int, size: int, *rest: Any, own: Any = Runtime.memcpyAsync) -> None:
        own(self, to, source, size, *rest)
        if found.on:
            found.note("cp.memcpyAsync", 2 * size)

    def read(own: Any) -> Any:
        def reads(self: Any) -> Any:
            if found.on and not inside[0]:
                found.note(".read", 0, wait=True)
            return own(self)

        return reads

    with pytest.MonkeyPatch.context() as patch:
        cupy, plc = sys.modules["cupy"], sys.modules["pylibcudf"]
        for name, call in list(vars(cupy).items()):
            if callable(call) and not isinstance(call, (type, np.ufunc)):
                patch.setattr(cupy, name, counted(f"cp.{name}", call))
        patch.setattr(cupy, "fuse", lambda function, own=cupy.fuse: counted("cp.fuse", own(function)))
        patch.setattr(cupy.add, "at", counted("cp.add.at", cupy.add.at))
        for part in _LIBCUDF:
            for name, call in list(vars(getattr(plc, part)).items()):
                if callable(call) and not isinstance(call, type):
                    patch.setattr(getattr(plc, part), name, counted(f"plc.{name}", call))
        patch.setattr(Column, "to_arrow", counted("column.to_arrow", Column.to_arrow))
        patch.setattr(Event, "synchronize", counted("cp.Event.synchronize", Event.synchronize))
        patch.setattr(Runtime, "memcpyAsync", copied)
        patch.setattr(RawKernel, "__call__", counted("cp.RawKernel", RawKernel.__call__))
        patch.setattr(ndarray, "__array_ufunc__", counted("ufunc", ndarray.__array_ufunc__))
        for name in ("sum", "all", "any", "max", "min", "astype", "sort", "copy"):
            patch.setattr(ndarray, name, counted(f"array.{name}", getattr(ndarray, name)))
        patch.setattr(ndarray, "__getitem__", indexed)
        patch.setattr(ndarray, "__setitem__", assigned)
        for name in ("__int__", "__bool__", "__float__", "__index__"):
            patch.setattr(ndarray, name, read(getattr(np.ndarray, name)), raising=False)
        yield found


def count(changes: int, emit: Any = "per_batch", mix: str = "changes") -> Calls:
    """The calls of one micro-batch, prepared and committed, on a state four times as large."""
    with emulated(), counting() as found:
        found.on = False
        feed = Feed(2 * changes, changes, mix)
        join = description(emit, unique=mix != "inserts", insert_only=mix == "inserts")
        with contextlib.closing(JoinEngine(join, "gpu")) as engine:
            engine.restore(feed.start())
            *before, last = feed.batches(4)
            for pair in before:
                engine.process(*pair)
            found.on = True
            engine.process(*last)
            found.on = False
    return found


def count_operator(name: str, changes: int) -> Calls:
    """The calls of an operator's last micro-batch, prepared and committed."""
    with emulated(), counting() as found:
        found.on = False
        described, (*before, last) = OPERATORS[name](changes, _BATCHES)
        with contextlib.closing(JoinEngine(described, "gpu")) as engine:
            for batch in before:
                engine.process(*batch)
            found.on = True
            engine.process(*last)
            found.on = False
    return found


def main() -> None:
    """Print where the calls are."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--changes", type=int, default=100_000)
    parser.add_argument("--emit", default="per_batch")
    parser.add_argument("--mix", default="changes")
    parser.add_argument("--operator", choices=(*OPERATORS, "all"), help="instead of a left join whose state is loaded")
    options = parser.parse_args()
    if options.operator == "all":
        for name in OPERATORS:
            found = count_operator(name, options.changes)
            print(f'    "{name}": ({sum(found.calls.values())}, {sum(found.waits.values())}),')
        return
    if options.operator is None:
        found = count(options.changes, options.emit, options.mix)
    else:
        found = count_operator(options.operator, options.changes)
    total, moved = sum(found.calls.values()), sum(found.bytes.values())
    print(f"{total} calls, {sum(found.waits.values())} waits, {moved / options.changes:.0f} bytes a change")
    places: Counter[str] = Counter()
    for (place, _), number in found.calls.items():
        places[place] += number
    for place, number in places.most_common(40):
        size = sum(b for (p, _), b in found.bytes.items() if p == place)
        print(f"{number:5d} calls {found.waits[place]:4d} waits {size / options.changes:8.1f} bytes a change  {place}")


if __name__ == "__main__":
    main()
