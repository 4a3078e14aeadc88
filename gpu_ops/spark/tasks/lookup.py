"""Looking keys up by a user's function, in Spark's tasks: once per micro-batch and partition, with distinct keys."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.descriptions.join import LookupJoin
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.errors import DescriptionError
from gpu_ops.join_engine import JoinEngine
from gpu_ops.spark.tasks.arrow import arrow_task
from gpu_ops.spark.tasks.functions import as_declared

_log = logging.getLogger(__name__)

_AT: Final = "__at"
_FIRST_WAIT_S: Final = 0.1

Function = Callable[[pa.Table], pa.Table]
"""Keys in, the rows of the table that have one of them out."""


class Lookups(NamedTuple):
    """How a table is asked.

    Attributes:
        function: the user's.
        cache_s: seconds for which an answer is good, 0 for none beyond the micro-batch.
        cache_keys: how many keys' answers a worker keeps, the newest.
        retries: how often a call that fails is repeated.
    """

    function: Function
    cache_s: float
    cache_keys: int
    retries: int


class LookupTask:
    """The function of ``mapInArrow``: left rows in, the changelog of a lookup join out.

    Args:
        description: the join, as JSON.
        lookups: how its right input is asked.
        token: of the join, by which a worker finds its cache again.
    """

    def __init__(self, description: str, lookups: Lookups, token: str) -> None:
        self.__name__ = "gpu_lookup"
        self._description, self._lookups, self._token = description, lookups, token

    @arrow_task
    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Gives the left rows with what the function says of their keys."""
        described = from_json(self._description)
        assert isinstance(described, LookupJoin)
        schema = described.left.schema
        rows = [pa.RecordBatch.from_arrays(batch.columns, schema.names) for batch in batches if batch.num_rows]
        if not rows:
            return
        left = pa.Table.from_batches(rows).cast(schema)
        cache = _caches.setdefault(self._token, _Cache(described, self._lookups))
        with contextlib.closing(JoinEngine(described, "cpu")) as engine:
            yield from engine.process(left=left, right=cache.rows_of(left)).to_batches()


class _Cache:
    """Keys that were asked for lately, and the rows that they have.

    Args:
        join: the join.
        lookups: how its right input is asked.
    """

    def __init__(self, join: LookupJoin, lookups: Lookups) -> None:
        self._lookups, self._schema = lookups, join.right.schema
        self._left, self._right = list(join.key_columns(0)), list(join.key_columns(1))
        keys = pa.schema([self._schema.field(name) for name in self._right])
        self._keys = keys
        self._asked = keys.append(pa.field(_AT, pa.float64())).empty_table()
        self._found = self._schema.empty_table()

    def rows_of(self, left: pa.Table) -> pa.Table:
        """The table's rows that have the keys of some left rows; others may be among them."""
        now, names = time.monotonic(), self._right
        wanted = left.select(self._left).rename_columns(names).drop_null().cast(self._keys)
        wanted = wanted.group_by(names).aggregate([]).select(names)
        self._forget(now)
        missing = wanted.join(self._asked.select(names), names, join_type="left anti")
        if missing.num_rows:
            asked = missing.append_column(_AT, pa.array([now]).take(pa.array([0] * missing.num_rows)))
            self._found = pa.concat_tables([self._found, self._ask(missing)])
            self._asked = pa.concat_tables([self._asked, asked.select(self._asked.column_names)])
        return self._found

    def _forget(self, now: float) -> None:
        """Answers that are too old, or too many."""
        fresh = self._asked.filter(pc.greater(self._asked[_AT], now - self._lookups.cache_s))
        fresh = fresh.slice(max(0, fresh.num_rows - self._lookups.cache_keys))
        if fresh.num_rows < self._asked.num_rows:
            self._asked = fresh
            self._found = self._of(self._found, fresh)

    def _ask(self, keys: pa.Table) -> pa.Table:
        function, wait = self._lookups.function, _FIRST_WAIT_S
        who = f"lookup function {getattr(function, '__name__', type(function).__name__)}"
        for attempt in range(self._lookups.retries + 1):
            try:
                made = function(keys)
                break
            except Exception as error:
                if attempt == self._lookups.retries:
                    raise
                _log.warning("%s failed, and is called again in %.1f s: %s", who, wait, error)
                time.sleep(wait)
                wait *= 2
        if not isinstance(made, pa.Table):
            raise DescriptionError(f"{who} gives a table, not {type(made).__name__}")
        found = pa.Table.from_arrays(as_declared(who, made, self._schema), schema=self._schema)
        return self._of(found, keys)  # rows of other keys may be there already, or come again

    def _of(self, rows: pa.Table, keys: pa.Table) -> pa.Table:
        """Those rows that have one of some keys, in their order."""
        places = rows.select(self._right).append_column(_AT, pa.array(range(rows.num_rows), pa.int64()))
        kept = places.join(keys.select(self._right), self._right, join_type="left semi")
        return rows.take(kept[_AT].combine_chunks().sort())


_caches: dict[str, _Cache] = {}
"""Of this worker's process, by a join's token."""
