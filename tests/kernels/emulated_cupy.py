"""A stand-in for cupy, cupyx and rmm on numpy, for machines without a card.

It has only what the GPU backend uses, and refuses what cupy refuses although numpy would not: host arrays among
device arrays, numpy functions on device arrays, 64-bit signed scatter-adds. As on the card, an element of an array is
an array of no dimensions. What it cannot show is how the card behaves; the tests marked ``gpu`` do.
"""

from __future__ import annotations

import ctypes
import types
import weakref
from typing import Any

import numpy as np

from kernels.twins import TWINS

HOST = np.ndarray


def plain(value: Any) -> Any:
    """Device arrays as numpy arrays, for numpy's own functions; host arrays are refused."""
    if isinstance(value, ndarray):
        return value.view(HOST)
    if isinstance(value, HOST):
        raise TypeError("Unsupported type <class 'numpy.ndarray'>: a host array among device arrays")
    if isinstance(value, (list, tuple)):
        return type(value)(plain(v) for v in value)
    return value


def wrapped(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(wrapped(v) for v in value)
    return np.asarray(value).view(ndarray) if isinstance(value, (HOST, np.generic)) else value


def _refuse_races(index: Any, values: Any) -> None:
    """Of several values for one position, numpy keeps the last one; a card any of them."""
    if isinstance(index, HOST) and index.dtype.kind in "iu" and np.size(values) > 1:
        order = np.argsort(index, kind="stable")
        again = index[order][1:] == index[order][:-1]
        if again.any():
            given = np.broadcast_to(values, index.shape)[order]
            same = given[1:] == given[:-1]
            assert same[again].all(), "different values for one position: on a card any of them may stay"


class ndarray(HOST):  # noqa: N801 - cupy's name
    """A device array."""

    def __new__(cls, shape: Any, dtype: Any, memptr: Any) -> ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        memory = (ctypes.c_char * size).from_address(memptr.ptr)
        memory.owner = memptr  # numpy keeps this object alive with every view
        return np.frombuffer(memory, dtype).reshape(shape).view(cls)

    @property
    def data(self) -> Any:
        """Where it is, as cupy has it."""
        return types.SimpleNamespace(ptr=self.__array_interface__["data"][0])

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        own = self.__array_interface__
        data = (own["data"][0] if self.size else 0, False)
        return {"shape": self.shape, "typestr": own["typestr"], "data": data, "version": 3, "strides": None}

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, out: Any = None, **options: Any) -> Any:
        if method == "accumulate":
            raise TypeError(f"cupy.{ufunc.__name__} has no accumulate")
        if out is not None:
            options["out"] = plain(out)
        with np.errstate(all="ignore"):
            return wrapped(getattr(ufunc, method)(*plain(inputs), **options))

    def __array_function__(self, function: Any, *_: Any) -> Any:
        raise TypeError(f"numpy.{function.__name__} of a device array")

    def __getitem__(self, index: Any) -> Any:
        where = plain(index)
        found = self.view(HOST)[where]
        if isinstance(found, np.generic):  # an element is a view, too
            found = self.view(HOST)[(*where, ...) if isinstance(where, tuple) else (where, ...)]
        return wrapped(found)

    def __setitem__(self, index: Any, value: Any) -> None:
        where, values = plain(index), plain(value)
        _refuse_races(where, values)
        self.view(HOST)[where] = values

    def astype(self, dtype: Any, *, copy: bool = True) -> Any:
        with np.errstate(all="ignore"):  # a card says nothing
            return wrapped(self.view(HOST).astype(dtype, copy=copy))

    def sum(self, **options: Any) -> Any:
        return wrapped(self.view(HOST).sum(**options))

    def all(self) -> Any:
        return wrapped(self.view(HOST).all())

    def any(self) -> Any:
        return wrapped(self.view(HOST).any())

    def max(self) -> Any:
        return wrapped(self.view(HOST).max())

    def min(self) -> Any:
        return wrapped(self.view(HOST).min())


def _device(function: Any, **only: Any) -> Any:
    def call(*args: Any, **options: Any) -> Any:
        for name, allowed in only.items():
            if options.get(name) not in allowed:
                raise ValueError(f"cupy.{function.__name__} takes no {name}={options[name]!r}")
        return wrapped(function(*plain(args), **{k: plain(v) for k, v in options.items()}))

    return call


_FUNCTIONS = [
    "argmax",
    "ascontiguousarray",
    "broadcast_to",
    "compress",
    "concatenate",
    "cumsum",
    "flatnonzero",
    "isin",
    "searchsorted",
    "stack",
    "take",
    "tile",
    "unique",
    "where",
    "zeros_like",
]
_CREATORS = ["arange", "empty", "full", "ones", "zeros"]
_UFUNCS = ["abs", "fmod", "isnan", "ldexp", "logical_or", "maximum", "minimum", "not_equal", "rint", "sqrt", "trunc"]


def _add_at(target: Any, index: Any, values: Any) -> None:
    if target.dtype not in (np.int32, np.uint32, np.uint64, np.float32, np.float64):
        raise TypeError(f"cupy.add.at of {target.dtype} is not sure to be there: CUDA's atomicAdd has none")
    if not isinstance(values, int) and target.dtype != values.dtype:
        raise TypeError("cupy.add.at of two types")
    np.add.at(plain(target), plain(index), plain(values))


def _repeat(values: Any, repeats: int) -> Any:
    if not isinstance(repeats, int):
        raise TypeError("cupy before 14.1.1 repeats by numbers of the host only")
    return wrapped(np.repeat(plain(values), repeats))


class RawKernel:
    """A kernel of the backend's own, by its twin."""

    def __init__(self, code: str, name: str) -> None:
        assert f"__global__ void {name}(" in code
        self._twin, self._arguments = TWINS[name], _arguments(code, name)

    def __call__(self, grid: tuple[int], block: tuple[int], args: tuple[Any, ...]) -> None:
        assert grid[0] > 0, "a launch of no threads"
        assert len(args) == len(self._arguments)
        for arg, kind in zip(args, self._arguments, strict=True):
            _check(arg, kind)
        self._twin(*(plain(arg) if isinstance(arg, ndarray) else arg for arg in args))


_SCALARS = {"i64": np.int64, "int": np.int32, "bool": np.bool_}
_POINTERS = {
    "u64": np.uint64,
    "i64": np.int64,
    "int": np.int32,
    "bool": np.bool_,
    "unsigned": np.uint32,
    "unsigned char": np.uint8,
    "signed char": np.int8,
}


def _arguments(code: str, name: str) -> list[str]:
    listed = code.split(f"__global__ void {name}(")[1].partition(")")[0]
    return [" ".join(word for word in argument.split()[:-1] if word != "const") for argument in listed.split(",")]


def _check(arg: Any, kind: str) -> None:
    """cupy passes on what it is given, whatever the kernel takes it for."""
    if kind.endswith("*"):
        assert isinstance(arg, ndarray), f"{kind}: {type(arg)}"
        assert arg.dtype == _POINTERS[kind[:-1].strip()], f"{kind}: {arg.dtype}"
        assert arg.flags.c_contiguous
    elif kind in _SCALARS:
        assert type(arg) is _SCALARS[kind], f"{kind}: {type(arg)}"
    else:
        assert isinstance(arg, HOST), f"{kind}: {type(arg)}"
        assert arg.size == 1, "only arrays of one element go by value"
        assert arg.nbytes <= 4000, "a launch takes 4 KB of arguments"


class _Fused:
    """A function of arrays and numbers, as one kernel: nothing of it is done by itself."""

    def __init__(self, function: Any) -> None:
        self._function = function

    def __call__(self, *args: Any) -> Any:
        sizes = {arg.size for arg in args if isinstance(arg, ndarray)}
        assert len(sizes) == 1, f"arrays of different sizes: {sizes}"
        assert all(arg is None or isinstance(arg, (ndarray, int)) for arg in args)
        result = self._function(*(plain(arg).view(_Operand) if isinstance(arg, ndarray) else arg for arg in args))
        return wrapped(tuple(map(_host, result)) if isinstance(result, tuple) else _host(result))


class _Operand(HOST):
    """What a fused function works on."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        assert method == "__call__", "not element by element"
        flags = any(isinstance(given, HOST) and given.dtype == bool for given in inputs)
        assert not (flags and any(type(given) is int for given in inputs)), "cupy makes small integers of flags"
        return getattr(ufunc, method)(*map(_host, inputs), **options).view(_Operand)


def _host(value: Any) -> Any:
    return value.view(HOST) if isinstance(value, HOST) else value


class _Memory:
    def __init__(self, ptr: int, size: int, owner: Any, _device: int = 0) -> None:
        self.ptr, self.size, self.owner = ptr, size, owner


class _Pointer:
    def __init__(self, memory: _Memory, offset: int) -> None:
        self.memory, self.ptr = memory, memory.ptr + offset


def modules() -> dict[str, types.ModuleType]:
    """The modules by name: cupy, cupyx, rmm and their parts."""
    cupy, cupyx = types.ModuleType("cupy"), types.ModuleType("cupyx")
    cupy.__dict__.update({name: _device(getattr(np, name)) for name in _FUNCTIONS})
    cupy.__dict__.update({name: _device(getattr(np, name)) for name in _CREATORS})
    cupy.__dict__.update({name: getattr(np, name) for name in _UFUNCS})
    cupy.__dict__.update(
        __version__="14.2.0",
        ndarray=ndarray,
        asarray=lambda values: values if isinstance(values, ndarray) else np.array(values).view(ndarray),
        array=lambda values: np.array(plain(values)).view(ndarray),
        asnumpy=lambda values: np.array(values.view(HOST)),
        sort=_device(np.sort, kind=(None, "stable")),
        argsort=lambda values: wrapped(np.argsort(plain(values), kind="stable")),
        clip=_device(np.clip),
        repeat=_repeat,
        add=types.SimpleNamespace(at=_add_at),
        RawKernel=RawKernel,
        fuse=lambda function: _Fused(function).__call__,
    )
    state: dict[str, Any] = {"allocator": "cupy's own"}
    runtime = Runtime()
    cupy.__dict__["cuda"] = types.SimpleNamespace(
        is_available=lambda: True,
        get_current_stream=lambda: types.SimpleNamespace(ptr=0),
        Device=lambda number=0: types.SimpleNamespace(id=number, synchronize=lambda: None),
        UnownedMemory=_Memory,
        MemoryPointer=_Pointer,
        MemoryPool=_Pool,
        alloc=lambda size: state["allocator"](size),  # noqa: PLW0108 - it changes
        get_allocator=lambda: state["allocator"],
        set_allocator=lambda allocator: state.update(allocator=allocator),
        PinnedMemory=_Pinned,
        Event=Event,
        Stream=runtime.stream,
        runtime=runtime,
    )
    return {"cupy": cupy, "cupyx": cupyx, **_rmm()}


class Event:
    """Recorded on the default stream, whose work is done at once, or on another."""

    def __init__(self, *, disable_timing: bool) -> None:
        assert disable_timing, "one that keeps time costs more"

    def record(self, stream: _Stream | None = None) -> None:
        self.of, self.work = stream, [] if stream is None else list(stream.work)

    def synchronize(self) -> None:
        if self.of is not None:
            for step in self.work:
                step()
            self.of.work = []
            self.of.after = False


class _Stream:
    """What is asked of it is done when somebody waits for it."""

    ptr = 8

    def __init__(self, *, non_blocking: bool) -> None:
        assert non_blocking
        self.work: list[Any] = []
        self.after = False

    def wait_event(self, event: Event) -> None:
        assert event.of is None
        self.after = True


class CudaError(RuntimeError):
    """As cupy's of CUDA's runtime."""

    def __init__(self, status: int) -> None:
        name = {2: "cudaErrorMemoryAllocation: out of memory", 700: "cudaErrorIllegalAddress: an illegal memory access"}
        super().__init__(name.get(status, f"cudaError{status}"))
        self.status = status


class Runtime(types.SimpleNamespace):
    CUDARuntimeError = CudaError
    memcpyDeviceToHost = 2  # noqa: N815 - cupy's name

    def __init__(self) -> None:
        self.streams: list[_Stream] = []
        self.pools: list[int] = []
        """Of each its release threshold, in bytes."""

    def memPoolCreate(self, properties: tuple[int, int, int, int]) -> int:  # noqa: N802 - cupy's name
        assert properties[:3] == (1, 0, 1)
        self.pools.append(-1)
        return len(self.pools)

    def memPoolSetAttribute(self, pool: int, attribute: int, value: int) -> None:  # noqa: N802 - cupy's name
        assert attribute == 4
        self.pools[pool - 1] = value

    def memPoolTrimTo(self, pool: int, size: int) -> None:  # noqa: N802 - cupy's name
        assert self.pools[pool - 1] == size == 0

    @staticmethod
    def MemPoolProps(*properties: int) -> tuple[int, ...]:  # noqa: N802 - cupy's name
        return properties

    def stream(self, *, non_blocking: bool) -> _Stream:
        made = _Stream(non_blocking=non_blocking)
        made.ptr = len(self.streams) + 8
        self.streams.append(made)
        return made

    def memcpyAsync(self, to: int, source: int, size: int, kind: int, stream: int) -> None:  # noqa: N802 - cupy's name
        assert kind == self.memcpyDeviceToHost
        assert size > 0
        assert self.streams[stream - 8].after, "copied before the kernels that fill it"
        self.streams[stream - 8].work.append(lambda: ctypes.memmove(to, source, size))

    @staticmethod
    def deviceGetAttribute(_attribute: int, _device: int) -> int:  # noqa: N802 - cupy's name
        return 1

    @staticmethod
    def memGetInfo() -> tuple[int, int]:  # noqa: N802 - cupy's name
        return 1 << 40, 1 << 40


class _Pinned:
    def __init__(self, size: int) -> None:
        self._memory = np.full(size, 0xA5, np.uint8)
        self.ptr = self._memory.ctypes.data


class _Async:
    def __init__(self, pool: tuple[str, int]) -> None:
        assert pool[0] == "cudaMemPool_t"
        self._handle = pool[1]

    def pool_handle(self) -> int:
        return self._handle

    def allocate(self, size: int) -> np.ndarray:
        return np.empty(size, np.uint8)

    def free(self, size: int) -> None:
        pass


class _Limiting:
    def __init__(self, upstream: Any, limit: int) -> None:
        self.upstream_mr, self._limit, self._used = upstream, limit, 0

    def get_allocated_bytes(self) -> int:
        return self._used

    def allocate(self, size: int) -> np.ndarray:
        if self._used + size > self._limit:
            raise MemoryError("std::bad_alloc: out_of_memory: RMM failure")
        self._used += size
        return self.upstream_mr.allocate(size)

    def free(self, size: int) -> None:
        self._used -= size


class _Failing:
    def __init__(self, upstream: Any, callback: Any) -> None:
        self.upstream_mr, self._callback = upstream, callback

    def allocate(self, size: int) -> np.ndarray:
        while True:
            try:
                return self.upstream_mr.allocate(size)
            except MemoryError:
                if not self._callback(size):
                    raise

    def free(self, size: int) -> None:
        self.upstream_mr.free(size)


class _Buffer:
    def __init__(self, *, size: int, mr: Any) -> None:
        self._memory = mr.allocate(size)
        self.ptr, self.size, self._mr = self._memory.ctypes.data, size, mr

    def __del__(self) -> None:
        if hasattr(self, "_mr"):
            self._mr.free(self.size)


class _Pool:
    """cupy's, which keeps what is freed; it cuts nothing up."""

    def __init__(self, allocator: Any) -> None:
        self._allocator, self._free, self._total = allocator, [], 0

    def malloc(self, size: int) -> _Pointer:
        size = -(-size // 512) * 512
        found = [memory for memory in self._free if memory.size == size]
        if found:
            self._free.remove(found[0])
        else:
            found = [self._allocator(size).memory]
            self._total += size
        memory = _Memory(found[0].ptr, size, found[0])
        weakref.finalize(memory, self._free.append, found[0])
        return _Pointer(memory, 0)

    def total_bytes(self) -> int:
        return self._total

    def free_bytes(self) -> int:
        return sum(memory.size for memory in self._free)

    def free_all_blocks(self) -> None:
        self._total -= sum(memory.size for memory in self._free)
        self._free.clear()


def _rmm() -> dict[str, types.ModuleType]:
    names = ("rmm", "rmm.mr", "cuda", "cuda.bindings", "cuda.bindings.runtime")
    made = {name: types.ModuleType(name) for name in names}
    state: dict[str, Any] = {"resource": "the first"}
    made["rmm.mr"].__dict__.update(
        get_current_device_resource=lambda: state["resource"],
        set_current_device_resource=lambda resource: state.update(resource=resource),
        CudaAsyncViewMemoryResource=_Async,
        LimitingResourceAdaptor=_Limiting,
        FailureCallbackResourceAdaptor=_Failing,
    )
    made["cuda.bindings.runtime"].__dict__.update(cudaMemPool_t=lambda handle: ("cudaMemPool_t", handle))
    made["rmm"].__dict__.update(mr=made["rmm.mr"], DeviceBuffer=_Buffer)
    return made
