"""Where a micro-batch's time goes: what an engine spends on Arrow and on the bus, apart from the join."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import gpu_ops.operator_engine
import gpu_ops.output
from benchmarks.common import Summary, summarise
from gpu_ops.operator_engine import OperatorEngine

TRANSFERS = ("frame", "to_arrow", "asarray", "asnumpy")
"""Methods of `gpu_ops.kernels.Kernels` that cross between host and card, or between Arrow and the backend."""
HOST = ("ingest", "row_kinds")
"""What the host does beside: checking, decoding and ordering changes; the first column of the changelog."""


class Watch:
    """Times the calls of one engine while it is `on`; with a card it waits for it before and after each of them.

    Args:
        engine: not used by other threads meanwhile.
        synchronize: waits for the card; nothing on the CPU.
    """

    def __init__(self, engine: OperatorEngine, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._engine = engine
        self._inside = False
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def on(self) -> Iterator[dict[str, float]]:
        """Within it calls are timed; gives seconds per name, complete at the end."""
        kernels: Any = self._engine.kernels
        self.seconds = dict.fromkeys((*TRANSFERS, *HOST), 0.0)
        modules: list[tuple[Any, str]] = [(gpu_ops.operator_engine, "ingest"), (gpu_ops.output, "encode_row_kinds")]
        honest = [getattr(module, call) for module, call in modules]
        for (module, call), name, own in zip(modules, HOST, honest, strict=True):
            setattr(module, call, self._timed(name, own))
        for name in TRANSFERS:
            setattr(kernels, name, self._timed(name, getattr(kernels, name)))
        try:
            yield self.seconds
        finally:
            for (module, call), own in zip(modules, honest, strict=True):
                setattr(module, call, own)
            for name in TRANSFERS:
                delattr(kernels, name)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            if self._inside:  # a call of another that is timed
                return call(*args, **options)
            self._inside = True
            self._synchronize()
            before = time.perf_counter()
            try:
                result = call(*args, **options)
                self._synchronize()
                return result
            finally:
                self.seconds[name] += time.perf_counter() - before
                self._inside = False

        return timed


def split(batches: list[tuple[float, dict[str, float]]], changes: int) -> dict[str, Any]:
    """Summarises the watched micro-batches by part.

    Args:
        batches: seconds of each, and of its parts.
        changes: in each of them.

    Returns:
        Milliseconds of each part and of the rest; changes per second without Arrow and the bus, and without the host's
        part too: all changes over all seconds, so that merges that come now and then count.
    """
    crossing = [sum(parts[name] for name in TRANSFERS) for _, parts in batches]
    rest = [seconds - crossed for (seconds, _), crossed in zip(batches, crossing, strict=True)]
    alone = [seconds - sum(parts[n] for n in HOST) for seconds, (_, parts) in zip(rest, batches, strict=True)]
    names = (*TRANSFERS, *HOST)
    ms: dict[str, Summary] = {name: summarise(1e3 * parts[name] for _, parts in batches) for name in names}
    for name, seconds in (("transfer", crossing), ("without_transfer", rest), ("join_alone", alone)):
        ms[name] = summarise(1e3 * s for s in seconds)
    return {
        "ms": ms,
        "changes_per_second_without_transfer": changes * len(rest) / sum(rest),
        "changes_per_second_join_alone": changes * len(alone) / sum(alone),
    }
