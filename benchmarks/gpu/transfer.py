"""Between host and card: plain copies, and Arrow columns there and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.common import Summary, summarise
from benchmarks.gpu.card import INPUTS, figure, synchronize
from gpu_ops.descriptions.changelog import encode_row_kinds
from gpu_ops.kernels import Kernels

NUMBERS = pa.schema([("k", pa.int64()), ("a", pa.int64())])
TEXT = pa.schema([("k", pa.int64()), ("s", pa.string())])


def wall_ms(works: Sequence[Callable[[], object]], rounds: int) -> Summary:
    """Milliseconds on the host's clock until the card is done, each round on the next of the inputs."""
    for work in works:
        work()
    found = []
    for number in range(max(1, rounds)):
        synchronize()
        before = time.perf_counter()
        works[number % len(works)]()
        synchronize()
        found.append(1e3 * (time.perf_counter() - before))
    return summarise(found)


def transfer(kernels: Kernels, rows: int, rounds: int) -> dict[str, Any]:
    """Measures the copies and conversions of a micro-batch on its way in and out.

    Returns:
        Figures without a share of the copy bandwidth: the bus is the limit here. ``*_pageable`` and ``*_pinned`` are
        copies of the same bytes from and to ordinary and page-locked memory, ``arrow_to_frame`` and ``frame_to_arrow``
        the backend's own conversions, ``row_kinds`` the host's encoding of a changelog's first column.
    """
    rng = np.random.default_rng(5)
    words = pa.array([f"value {i}" for i in range(1000)])
    tables = {
        "numbers": [
            pa.table([rng.integers(0, rows, rows), rng.integers(0, 1000, rows)], schema=NUMBERS) for _ in range(INPUTS)
        ],
        "text": [
            pa.table([rng.integers(0, rows, rows), words.take(pa.array(rng.integers(0, 1000, rows)))], schema=TEXT)
            for _ in range(INPUTS)
        ],
    }
    found: dict[str, Any] = {"rows": rows, **_plain(kernels, rows, rounds)}
    for name, given in tables.items():
        frames = [kernels.frame(table) for table in given]
        size = given[0].nbytes
        ins = [partial(kernels.frame, table) for table in given]
        outs = [partial(kernels.to_arrow, frame, given[0].schema) for frame in frames]
        if not kernels.to_arrow(frames[0], given[0].schema).equals(given[0]):
            raise AssertionError(f"{name} came back otherwise")
        found[f"arrow_to_frame_{name}"] = figure(wall_ms(ins, rounds), size, None)
        found[f"frame_to_arrow_{name}"] = figure(wall_ms(outs, rounds), size, None)
    kinds = [rng.integers(0, 4, rows).astype(np.int8) for _ in range(INPUTS)]
    found["row_kinds"] = figure(wall_ms([partial(encode_row_kinds, codes) for codes in kinds], rounds), rows, None)
    return found


def _plain(kernels: Kernels, rows: int, rounds: int) -> dict[str, Any]:
    import cupyx

    hosts = [np.random.default_rng(n).integers(0, rows, 2 * rows) for n in range(INPUTS)]
    arrays = [kernels.asarray(host) for host in hosts]
    pinned = [cupyx.empty_pinned(2 * rows, np.int64) for _ in range(INPUTS)]
    for locked, host in zip(pinned, hosts, strict=True):
        locked[:] = host
    pairs = list(zip(arrays, pinned, strict=True))
    ways = {
        "to_card_pageable": [partial(kernels.asarray, host) for host in hosts],
        "to_host_pageable": [partial(kernels.asnumpy, array) for array in arrays],
        "to_card_pinned": [partial(array.set, locked) for array, locked in pairs],
        "to_host_pinned": [partial(array.get, out=locked) for array, locked in pairs],
    }
    found = {name: figure(wall_ms(works, rounds), arrays[0].nbytes, None) for name, works in ways.items()}
    if not all(np.array_equal(a, b) for a, b in zip(pinned, hosts, strict=True)):
        raise AssertionError("a copy came back otherwise")
    return found
