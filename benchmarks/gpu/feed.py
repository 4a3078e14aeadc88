"""Changes for an engine whose state is large already: inserts, updates and deletes of known rows.

Both inputs hold the keys 0 to n - 1 in the beginning. A micro-batch deletes and updates rows that no earlier one
touched, in random order, and inserts rows with new keys: the left's a micro-batch before the right's, so that pads come
and go. Everything follows from the numbers given, so all engines see the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.descriptions.description import Emit
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import normalize_on

KIND = "op"
SCHEMAS = tuple(pa.schema([("k", pa.int64()), (name, pa.int64())]) for name in "ab")
MIXES = {"changes": (0.6, 0.15, 0.1), "inserts": (1.0, 0.0, 0.0)}
"""Of all changes of a micro-batch: those that insert, updates (each is two changes), those that delete."""
KEYS = ("int64", "text", "skewed")
"""Numbers; text of some 20 bytes; or numbers, of which a tenth of the left's rows have the same one: so the left has no
unique key."""
_KINDS = pa.array(["+I", "-U", "+U", "-D"])


def description(emit: Emit, *, unique: bool, insert_only: bool = False, keys: str = "int64") -> Join:
    """A left join on one key.

    Args:
        emit: as of `gpu_ops.descriptions.join.Join`.
        unique: the key is each input's unique key; else the inputs are multisets.
        insert_only: without a row-kind column.
        keys: of `KEYS`.
    """
    sides = []
    for side, name in enumerate(("left", "right")):
        key = ("k",) if unique and (side or keys != "skewed") else None
        sides.append(Input(name, _schema(side, keys), row_kind=None if insert_only else KIND, unique_key=key))
    return Join("left", *sides, normalize_on("k"), emit=emit)


class Feed:
    """The rows of the beginning, and micro-batches.

    Args:
        rows: per input in the beginning.
        changes: of a micro-batch, half of them from either input.
        mix: of `MIXES`.
        keys: of `KEYS`.
        seed: of all that is random.
    """

    def __init__(self, rows: int, changes: int, mix: str = "changes", keys: str = "int64", seed: int = 7) -> None:
        self.rows, self.half, self._mix, self._keys = rows, changes // 2, mix, keys
        inserts, updates, deletes = MIXES[mix]
        self._counts = int(inserts * self.half), int(updates * self.half), int(deletes * self.half)
        self._seed = seed

    @property
    def most(self) -> int:
        """The largest number of micro-batches, after which every row has been touched."""
        touched = self._counts[1] + self._counts[2]
        return self.rows // touched if touched else 1 << 30

    def start(self) -> dict[str, pa.Table]:
        """The state in the beginning, as `gpu_ops.join_engine.JoinEngine.restore` takes it: all keys match once."""
        tables = {}
        for side, name in enumerate(("left", "right")):
            keys = np.random.default_rng([self._seed, side]).permutation(self.rows)
            tables[name] = self._columns(side, keys, 0)
        tables["left"] = tables["left"].append_column("__count", pa.array(np.ones(self.rows, np.int64)))
        return tables

    def batches(self, count: int) -> Iterator[tuple[pa.Table, pa.Table]]:
        """The changes of both inputs, micro-batch by micro-batch.

        Raises:
            ValueError: more micro-batches than `most`.
        """
        if count > self.most:
            raise ValueError(f"{count} micro-batches touch more than {self.rows} rows; {self.most} are possible")
        inserts, updates, deletes = self._counts
        step = updates + deletes
        touched = [_some(self.rows, count * step, (self._seed, 2 + side)) for side in (0, 1)]
        for number in range(count):
            pair = []
            for side in (0, 1):
                old = touched[side][number * step : (number + 1) * step]
                new = self.rows + (number - side) * inserts + np.arange(inserts)
                new = new[new >= self.rows]
                pair.append(self._table(side, number, (new, old[:updates], old[updates:])))
            yield pair[0], pair[1]

    def _table(self, side: int, number: int, keys: tuple[np.ndarray, np.ndarray, np.ndarray]) -> pa.Table:
        """Insertions, updates and deletions mixed, each update's two changes side by side."""
        new, updated, gone = keys
        sizes = [new.size, updated.size, gone.size]
        order = np.random.default_rng([self._seed, 4 + side, number]).permutation(sum(sizes))
        what = np.repeat(np.array([0, 1, 3]), sizes)[order]
        key = np.concatenate(keys)[order]
        twice = np.where(what == 1, 2, 1)
        at = np.repeat(np.arange(what.size), twice)
        second = np.concatenate([np.zeros(1, bool), at[1:] == at[:-1]]) if at.size else np.zeros(0, bool)
        kind, key = what[at] + second, key[at]
        table = self._columns(side, key, (kind == 2).astype(np.int64))
        return table if self._mix == "inserts" else table.append_column(KIND, _KINDS.take(pa.array(kind)))

    def _columns(self, side: int, numbers: np.ndarray, version: int | np.ndarray) -> pa.Table:
        """Rows by their numbers, and how often each was updated."""
        if self._keys == "skewed":
            key = np.where((numbers % 10 == 0) & (side == 0), 0, numbers)
            return pa.table([key, 2 * numbers + version], schema=SCHEMAS[side])
        key = pa.array(numbers)
        if self._keys == "text":
            key = pc.binary_join_element_wise("customer", key.cast(pa.string()), "-")
        return pa.table([key, numbers % 1000 + version], schema=_schema(side, self._keys))


def _schema(side: int, keys: str) -> pa.Schema:
    own: pa.Schema = SCHEMAS[side]
    return own.set(0, pa.field("k", pa.string())) if keys == "text" else own


def _some(rows: int, count: int, seed: tuple[int, int]) -> np.ndarray:
    """So many different keys below ``rows``, in random order, without a permutation of all of them."""
    if not count:
        return np.empty(0, np.int64)
    rng = np.random.default_rng(list(seed))
    width = max(1, rows // count)
    found: np.ndarray = rng.permutation(count) * width + rng.integers(0, width, count)
    return found
