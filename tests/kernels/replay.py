"""Calls of pylibcudf, made once on the stand-in and once more, with arguments of the same types, on the real library.

No card is needed: columns lie in host memory, which libcudf does not look into before it asks for a card. By then
Cython has converted the arguments and libcudf has compared types and sizes; a call is wrong if it fails before. That
far it comes only where something says that there is a driver: `DRIVER` does, and fails whatever else is asked of it.

    PYTHONPATH=tests LD_LIBRARY_PATH=<folder of the built driver> python -m kernels.replay RESULT [PYTEST ARGUMENTS]
"""

from __future__ import annotations

import ctypes
import enum
import importlib
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from kernels import emulated_libcudf
from kernels.emulated_arrow import told
from kernels.emulated_cupy import HOST, ndarray
from kernels.emulated_libcudf import Aggregation, Column, DataType, GroupBy, GroupByRequest, Scalar, Span, Table

DRIVER = """
#include <string.h>
static int current(void **context) { *context = (void *)1; return 0; }
static int none(void) { return 3; }
int cuGetProcAddress_v2(const char *name, void **found, int version, unsigned long long flags, int *status) {
  *found = strcmp(name, "cuCtxGetCurrent") ? (void *)none : (void *)current;
  if (status) *status = 0;
  return 0;
}
"""
"""A ``libcuda.so.1`` with a context and nothing else."""
NO_CARD = ("cudaErrorInsufficientDriver", "cudaErrorNoDevice")
METHODS = (
    "copy data type null_mask null_count size offset child with_mask device_buffer_size list_view to_arrow to_scalar"
)
Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Name, arguments by position, arguments by name."""


def describe(value: Any) -> str:
    """What tells one argument from another: types, whether there are nulls, whether there are rows."""
    if isinstance(value, Column):
        array = value.array
        return f"{array.type}{'?' if array.null_count else ''}[{min(len(array), 2)}]"
    if isinstance(value, Table):
        return f"table{describe(value.columns())}"
    if isinstance(value, ndarray):
        return f"array {value.dtype} {min(value.size, 2)} {value.ndim}d"
    if isinstance(value, pa.Array):
        buffers = [buffer is not None for buffer in value.buffers()]
        return f"arrow {value.type} {min(len(value), 2)} {value.offset > 0} {value.null_count > 0} {buffers}"
    if isinstance(value, GroupByRequest):
        return f"{describe(value.values)} {value.aggregations}"
    if isinstance(value, GroupBy):
        return f"groups {describe(value.keys)}"
    if isinstance(value, DataType):
        return f"type {value.type_id.name}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(sorted({describe(v) for v in value}))})"
    return str(value) if isinstance(value, enum.Enum) else type(value).__name__


class Recorder:
    """Collects the calls that the backend makes; what these call themselves is not counted."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, str], Call] = {}
        self._inside = False

    def wrap(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """The same call, noted."""

        def noted(*args: Any, **options: Any) -> Any:
            if self._inside:
                return call(*args, **options)
            self._inside = True
            try:
                said = ", ".join([*map(describe, args), *(f"{k}={describe(v)}" for k, v in options.items())])
                self.known.setdefault((name, said), (name, args, options))
                return call(*args, **options)
            finally:
                self._inside = False

        return noted

    def install(self) -> None:
        """From now on, in this process, all stand-ins for pylibcudf note their calls."""
        made = emulated_libcudf.modules
        for name in METHODS.split():
            setattr(Column, name, self.wrap(f"Column.{name}", getattr(Column, name)))
        Table.copy = self.wrap("Table.copy", Table.copy)  # type: ignore[method-assign]
        GroupBy.aggregate = self.wrap("GroupBy.aggregate", GroupBy.aggregate)  # type: ignore[method-assign]
        for name in ("from_arrow", "from_cuda_array_interface"):
            setattr(Column, name, staticmethod(self.wrap(f"Column.{name}", getattr(Column, name))))
        for owner, name in ((Column, "Column"), (Table, "Table")):
            owner.__init__ = self._made(f"{name}.__new__", owner.__init__)  # type: ignore[method-assign]

        def noting() -> dict[str, Any]:
            modules = made()
            library = modules["pylibcudf"]
            library.gpumemoryview = self.wrap("gpumemoryview", library.gpumemoryview)
            parts = {name: part for name, part in vars(library).items() if not isinstance(part, type)}
            for name, part in parts.items():
                for call, function in list(getattr(part, "__dict__", {}).items()):
                    if callable(function) and not isinstance(function, type):
                        setattr(part, call, self.wrap(f"{name}.{call}", function))
            return modules

        emulated_libcudf.modules = noting

    def _made(self, name: str, own: Callable[..., None]) -> Callable[..., None]:
        noted = self.wrap(name, lambda *_: None)

        def init(new: Any, *args: Any) -> None:
            noted(*args)
            own(new, *args)

        return init


class Memory:
    """Host memory that says it is the card's."""

    def __init__(self, data: np.ndarray) -> None:
        self._data = np.ascontiguousarray(data)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        own = self._data.__array_interface__
        data = (own["data"][0] if self._data.size else 0, False)
        return {"shape": own["shape"], "typestr": own["typestr"], "data": data, "strides": None, "version": 3}


class NotMadeError(Exception):
    """An argument that needs a card."""


class Player:
    """Makes the calls on the real library."""

    def __init__(self, library: Any, memory: Any) -> None:
        self.library = library
        self.resource = memory.CallbackMemoryResource(self._allocate, lambda *_: None)
        self._kept: list[np.ndarray] = []

    def _allocate(self, size: int, *_: Any) -> int:
        self._kept.append(np.zeros(size + 256, np.uint8))
        return int(self._kept[-1].ctypes.data + 255) // 256 * 256

    def view(self, data: np.ndarray) -> Any:
        return self.library.gpumemoryview(Memory(data))

    def column(self, array: pa.Array) -> Any:
        """A column of an array's type, length and nulls; fixed-width values as they are."""
        plc, kind = self.library, array.type
        types, children = plc.TypeId, []
        if pa.types.is_struct(kind):
            type_, data = types.STRUCT, None
            children = [self.column(array.field(i)) for i in range(kind.num_fields)]
        elif pa.types.is_list(kind):
            type_, data = types.LIST, None
            children = [self.column(pa.array(array.offsets)), self.column(array.values)]
        elif pa.types.is_string(kind) or pa.types.is_large_string(kind):
            wide = pa.types.is_large_string(kind)
            type_, data = types.STRING, self.view(np.zeros(array.nbytes, np.uint8))
            children = [self.column(pa.array(np.zeros(len(array) + 1, np.int64 if wide else np.int32)))]
        elif pa.types.is_decimal128(kind):
            type_, data = types.DECIMAL128, self.view(np.zeros((len(array), 2), np.int64))
        else:
            made = plc.Column.from_cuda_array_interface(Memory(np.zeros(len(array), kind.to_pandas_dtype())))
            type_, data = made.type().id(), made.data()
        mask = self.view(np.zeros(len(array) // 8 + 64, np.uint8)) if array.null_count else None
        return plc.Column(plc.DataType(type_), len(array), data, mask, array.null_count, 0, children)

    def real(self, value: Any) -> Any:
        """The real library's counterpart of a stand-in's object."""
        plc = self.library
        if isinstance(value, Column):
            return self.column(value.array)
        if isinstance(value, Table):
            return plc.Table([self.column(column.array) for column in value.columns()])
        if isinstance(value, Aggregation):
            return getattr(plc.aggregation, value.name)(*([] if value.policy is None else [self.real(value.policy)]))
        if isinstance(value, GroupByRequest):
            return plc.groupby.GroupByRequest(self.real(value.values), self.real(value.aggregations))
        if isinstance(value, GroupBy):
            return plc.groupby.GroupBy(self.real(value.keys), self.real(value.null_handling))
        if isinstance(value, Span):
            return self.view(value._owner.view(np.uint8).reshape(-1))
        if isinstance(value, DataType):
            return plc.DataType(plc.TypeId[value.type_id.name], value.scale)
        if isinstance(value, Scalar):
            raise NotMadeError("a scalar")
        if isinstance(value, enum.Enum):
            found = [s for s in (plc.types, plc.copying, plc.binaryop, plc.reduce) if hasattr(s, type(value).__name__)]
            return getattr(found[0], type(value).__name__)[value.name]
        if isinstance(value, ndarray):
            return Memory(value.view(HOST))
        if isinstance(value, (list, tuple)):
            return type(value)(self.real(v) for v in value)
        return value

    def play(self, calls: Sequence[Call]) -> list[str]:
        """What came of each call.

        That is ``"done"``, ``"no card"``, ``"not made: ..."`` if an argument needs a card, or the error that it must
        not have. Cython passes None on as any column, for one, and libcudf crashes: so all this is done in another
        process, and in one more after each crash.
        """
        said: list[str] = []
        while len(said) < len(calls):
            there, here = os.pipe()
            child = os.fork()
            if child == 0:
                for call in calls[len(said) :]:
                    os.write(here, json.dumps(self._play(*call)).encode() + b"\n")
                os._exit(0)
            os.close(here)
            with os.fdopen(there) as pipe:
                said += map(json.loads, pipe)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if status:
                said.append(f"ended with {status}")
        return said

    def _play(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> str:
        *path, last = name.split(".")
        try:
            given = [self.real(value) for value in args]
            named = {k: self.real(v) for k, v in options.items()}
            if path in (["Column"], ["Table"], ["GroupBy"]) and last in [*METHODS.split(), "aggregate"]:
                call, given = getattr(given[0], last), given[1:]
            else:
                call = self.library
                for part in [*path, *([] if last == "__new__" else [last])]:
                    call = getattr(call, part)
            if name == "Column.to_arrow":
                kind = pa.Field._import_from_c_capsule(self.real(args[0])._to_schema()).type
                if kind != told(args[0].array).type:
                    return f"comes back as {kind}"
            # the resource in use, which is taken otherwise, can be had from a card only
            call(*given, **named, **({"mr": self.resource} if name in _ALLOCATE else {}))
        except NotMadeError as error:
            return f"not made: {error}"
        except Exception as error:  # what it is says what is wrong
            text = f"{type(error).__name__}: {error}"
            return "no card" if any(word in text for word in NO_CARD) else text
        return "done"


_ALLOCATE = {
    "Column.from_arrow",
    "Column.copy",
    "Column.to_scalar",
    "GroupBy.aggregate",
    "binaryop.binary_operation",
    "concatenate.concatenate",
    "copying.gather",
    "hashing.xxhash_64",
    "join.inner_join",
    "reduce.scan",
    "sorting.stable_sorted_order",
    "strings.contains.like",
    "transform.bools_to_mask",
    "unary.is_valid",
}


def mistakes(player: Player) -> dict[str, str]:
    """What comes of wrong calls: this finds them only if each says something."""
    bounds = emulated_libcudf.OutOfBoundsPolicy.DONT_CHECK
    numbers, doubles = (Column.of(pa.array([1, 2], kind)) for kind in (pa.int32(), pa.float64()))
    wrong: dict[str, tuple[str, tuple[Any, ...]]] = {
        "columns for a table": ("copying.gather", ([numbers], numbers, bounds)),
        "positions that are no integers": ("copying.gather", (Table([numbers]), doubles, bounds)),
        "no positions": ("copying.gather", (Table([numbers]), None, bounds)),
        "two types": ("concatenate.concatenate", ([numbers, doubles],)),
        "no text": ("strings.contains.like", (numbers, "a", "\\")),
        "no booleans": ("transform.bools_to_mask", (numbers,)),
        "host memory": ("gpumemoryview", ("host",)),
    }
    return dict(zip(wrong, player.play([(*call, {}) for call in wrong.values()]), strict=True))


def main(arguments: list[str]) -> dict[str, Any]:
    """Record what some tests call, play it, and say how often which outcome came."""
    if hasattr(ctypes.CDLL("libcuda.so.1"), "cuInit"):
        raise SystemExit("there is a real driver: it would be given host memory for a card's")
    library, memory = importlib.import_module("pylibcudf"), importlib.import_module("rmm.mr")
    recorder = Recorder()
    recorder.install()
    status = pytest.main(["-q", "-x", "-p", "no:cacheprovider", *arguments])
    player = Player(library, memory)
    outcomes: Counter[tuple[str, str]] = Counter()
    wrong = {}
    for (name, said), outcome in zip(recorder.known, player.play(list(recorder.known.values())), strict=True):
        fine = outcome in ("done", "no card") or outcome.startswith("not made")
        outcomes[name, outcome if fine else "wrong"] += 1
        if not fine:
            wrong[f"{name}({said})"] = outcome
    counted = [[*key, number] for key, number in sorted(outcomes.items())]
    return {"status": int(status), "outcomes": counted, "wrong": wrong, "mistakes": mistakes(player)}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(main(sys.argv[2:]), indent=1))
