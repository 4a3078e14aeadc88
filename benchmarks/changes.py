"""Generated changelogs of `orders` and `prices`, and `stocks` where a third is wanted, for the join benchmarks.

All are well formed: a retraction names exactly the row that is there at that time, and every `-U` is
directly followed by the `+U` of the same row. Rows arrive in no order of `order_id`: each change is equally
likely to meet state of any age, which is the hard case for an index and the honest one for a cache.

    python -m benchmarks.changes DIRECTORY --changes 2000000 --files 20
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

ORDERS = pa.schema(
    [
        ("op", pa.string()),
        ("order_id", pa.int64()),
        ("customer", pa.int64()),
        ("amount", pa.int64()),
        ("note", pa.string()),
    ]
)
PRICES = pa.schema([("op", pa.string()), ("order_id", pa.int64()), ("price", pa.float64()), ("source", pa.string())])
STOCKS = pa.schema([("op", pa.string()), ("order_id", pa.int64()), ("quantity", pa.int64()), ("place", pa.string())])
COUNTS_FILE = "counts.json"

_KINDS = pa.array(["+I", "-U", "+U", "-D"])
_SIGNS = np.array([1, -1, 1, -1], dtype=np.int64)
_INSERT, _UPDATE, _DELETE = 0, 1, 2

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Changes:
    """Changelogs as Arrow tables, with the columns of `ORDERS`, `PRICES` and `STOCKS`.

    Attributes:
        orders: the left input.
        prices: the right input.
        unique_key: whether `order_id` is a unique key of each input.
        stocks: a third input, or None.
    """

    orders: pa.Table
    prices: pa.Table
    unique_key: bool
    stocks: pa.Table | None = None

    @property
    def inputs(self) -> dict[str, pa.Table]:
        """The changelogs by name."""
        tables = {"orders": self.orders, "prices": self.prices}
        return tables if self.stocks is None else {**tables, "stocks": self.stocks}


@dataclass(frozen=True, slots=True)
class Counts:
    """The numbers of generated rows, and those to which `orders LEFT JOIN prices (LEFT JOIN stocks)` must fold.

    Attributes:
        changes: rows per input, `{"orders": n, "prices": n}`.
        kinds: rows per input and row kind.
        live: rows of each input after folding.
        unique_key: whether `order_id` is a unique key of each input.
        rows: rows of the folded join, null pads included.
        pads: rows without a price among them.
        amount: sum of `amount` over the folded join.
        price: sum of `price` over the folded join; a multiple of 0.25, so exact in a double.
    """

    changes: dict[str, int]
    kinds: dict[str, dict[str, int]]
    live: dict[str, int]
    unique_key: bool
    rows: int
    pads: int
    amount: int
    price: float


def generate(
    total: int = 2_000_000,
    share: float = 0.2,
    *,
    unique_key: bool = True,
    match: float = 0.8,
    rows_per_key: float = 2.0,
    seed: int = 0,
    inputs: int = 2,
) -> Changes:
    """Generates the changelogs of the inputs.

    Args:
        total: changes of all inputs together; each gets its part (a `-U` and its `+U` are two changes).
        share: share of the changes that are not `+I`: half of them update pairs, half deletes.
        unique_key: one live row per `order_id` and input; a quarter of the deletes is followed by a new row
            of the same key. Otherwise several rows share an `order_id`.
        match: with a unique key, the share of keys of one input that the other has too.
        rows_per_key: without a unique key, the mean number of rows per `order_id` and input.
        seed: equal arguments and seed give equal tables.
        inputs: 2, or 3 for `stocks` besides.

    Raises:
        ValueError: `share` outside 0..2/3 (there must be rows to delete), or `match` outside 0..1.
    """
    if not 0 <= share <= 2 / 3:
        raise ValueError(f"share of updates and deletes must lie in 0..2/3, not {share}")
    if not 0 < match <= 1:
        raise ValueError(f"match must lie in 0..1, without 0, not {match}")
    rng = np.random.default_rng(seed)
    sizes = [total // inputs] * inputs
    sizes[0] = total - sum(sizes[1:])
    tables: list[pa.Table] = []
    for size, schema in zip(sizes, (ORDERS, PRICES, STOCKS)[:inputs], strict=True):
        kind, entity, value = _timeline(rng, size, share, reuse=unique_key)
        entities = int(entity.max(initial=-1)) + 1
        if unique_key:
            domain = max(round(entities / match), entities)
            # All inputs draw their keys from one domain, so a key is in the other input with chance `match`.
            keys = rng.permutation(domain)
        else:
            keys = rng.integers(0, max(round(entities / rows_per_key), 1), max(entities, 1))
        tables.append(_table(rng, schema, kind, keys[entity], value))
    return Changes(tables[0], tables[1], unique_key, tables[2] if inputs > 2 else None)


def _timeline(rng: np.random.Generator, size: int, share: float, *, reuse: bool) -> tuple[IntArray, IntArray, IntArray]:
    """The changes of one input in order: row kind code, entity, and which generated value each one carries.

    An entity is what has a history of its own: a unique key, or a single row. Its events are an insert,
    updates and perhaps a delete; with `reuse` some entities get a second life after the delete.
    """
    updates = int(size * share / 4)
    deletes = min(round(size * share) - 2 * updates, size // 2 - updates)  # no more deletes than lives
    lives = size - 2 * updates - deletes
    again = deletes // 4 if reuse else 0
    entity_of_life = np.concatenate([np.arange(lives - again), np.arange(again)])
    # Lives 0..again-1 are the ones that are followed by another, so they must end.
    ended = np.concatenate([np.arange(again), again + rng.permutation(lives - again)[: deletes - again]])
    life = np.concatenate([np.arange(lives), rng.integers(0, max(lives, 1), updates), ended])
    step = np.repeat(np.array([_INSERT, _UPDATE, _DELETE]), [lives, updates, deletes])
    history = np.lexsort((step, life, entity_of_life[life]))  # a later life has the larger number
    step, entity = step[history], entity_of_life[life][history]

    # Each event gets a random time; within an entity the times go to its events in ascending order.
    times = rng.permutation(len(step))
    times = times[np.lexsort((times, entity))]
    event = np.empty(len(step), dtype=np.int64)
    event[times] = np.arange(len(step))

    rows = np.repeat(event, np.where(step[event] == _UPDATE, 2, 1))
    second = np.zeros(len(rows), dtype=bool)
    second[1:] = rows[1:] == rows[:-1]
    kind = np.select([step[rows] == _INSERT, step[rows] == _DELETE, second], [0, 3, 2], 1)
    # A retraction carries the value of the entity's event before, which is the row before it in `history`.
    value = np.where(_SIGNS[kind] > 0, rows, rows - 1)
    return kind, entity[rows], value


def _table(rng: np.random.Generator, schema: pa.Schema, kind: IntArray, key: IntArray, value: IntArray) -> pa.Table:
    values = int(value.max(initial=0)) + 1
    if schema is ORDERS:
        notes = pa.array([f"deliver to door {i} and ring twice" for i in range(1000)])
        payload = [
            pa.array(rng.integers(0, 100_000, values)[value]),
            pa.array(rng.integers(1, 1_000_000, values)[value]),
            notes.take(pa.array(rng.integers(0, len(notes), values)[value])),
        ]
    elif schema is STOCKS:
        places = pa.array([f"shelf {i} of the long hall" for i in range(500)])
        payload = [
            pa.array(rng.integers(0, 1000, values)[value]),
            places.take(pa.array(rng.integers(0, len(places), values)[value])),
        ]
    else:
        sources = pa.array([f"exchange {i}" for i in range(50)])
        payload = [
            pa.array(rng.integers(1, 4_000_000, values)[value] / 4),
            sources.take(pa.array(rng.integers(0, len(sources), values)[value])),
        ]
    return pa.table([_KINDS.take(pa.array(kind)), pa.array(key), *payload], schema=schema)


def count(changes: Changes) -> Counts:
    """Count the changes and fold the join by arithmetic on its key: no engine takes part."""
    inputs = changes.inputs
    keys = {name: table["order_id"].to_numpy() for name, table in inputs.items()}
    kinds = {
        name: {str(item["values"]): int(item["counts"]) for item in pc.value_counts(table["op"]).to_pylist()}
        for name, table in inputs.items()
    }
    size = max((int(key.max(initial=-1)) + 1 for key in keys.values()), default=0)
    sign = {name: np.where(pc.starts_with(table["op"], "+").to_numpy(), 1, -1) for name, table in inputs.items()}

    def folded(name: str, column: str | None = None) -> npt.NDArray[np.float64]:
        weight = sign[name] if column is None else sign[name] * inputs[name][column].to_numpy()
        # Sums of integers and of quarters far below 2**53, so exact.
        return np.bincount(keys[name], weights=weight.astype(np.float64), minlength=size).astype(np.float64)

    left, right = folded("orders"), folded("prices")
    stocked = np.maximum(folded("stocks"), 1) if "stocks" in inputs else np.ones(size)
    copies = np.maximum(right, 1) * stocked
    return Counts(
        changes={name: table.num_rows for name, table in inputs.items()},
        kinds=kinds,
        live={name: int(folded(name).sum()) for name in inputs},
        unique_key=changes.unique_key,
        rows=int((left * copies).sum()),
        pads=int((left * stocked)[right == 0].sum()),
        amount=int((folded("orders", "amount") * copies).sum()),
        price=float((left * stocked * folded("prices", "price")).sum()),
    )


def write(changes: Changes, directory: str | os.PathLike[str], files: int = 20, *, first_key: int = 0) -> Counts:
    """Write the inputs as CSV, `orders/part-00000.csv` ..., `prices/part-00000.csv` ... and so on, and the counts.

    No header and no quotes; columns as in `ORDERS` and `PRICES`. The order of the changes is the order of the
    files and of the lines in them. An update pair is never split between files. File times ascend by a second
    each, since a streaming file source takes files by their time.

    Args:
        changes: what `generate` returned.
        directory: created where missing; files of an earlier call are removed.
        files: files per input.
        first_key: what is added to each `order_id`, so that several such changelogs make one.

    Raises:
        ValueError: `files` is not positive.
    """
    if files < 1:
        raise ValueError(f"files must be positive, not {files}")
    root = Path(directory)
    counts = count(changes)
    options = csv.WriteOptions(include_header=False, quoting_style="none")
    newest = 1_700_000_000
    for name, own in changes.inputs.items():
        at = own.schema.get_field_index("order_id")
        table = own.set_column(at, own.schema.field(at), pc.add(own["order_id"], first_key)) if first_key else own
        folder = root / name
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("part-*.csv"):
            old.unlink()
        bounds = np.linspace(0, table.num_rows, files + 1).astype(np.int64)
        kinds = table["op"].take(pa.array(np.minimum(bounds, max(table.num_rows - 1, 0))))
        bounds[1:-1] += np.array([kind == "+U" for kind in kinds.to_pylist()])[1:-1]
        for i in range(files):
            path = folder / f"part-{i:05d}.csv"
            csv.write_csv(table.slice(bounds[i], bounds[i + 1] - bounds[i]), path, options)
            os.utime(path, (newest + i, newest + i))
    (root / COUNTS_FILE).write_text(json.dumps(asdict(counts), indent=2) + "\n")
    return counts


def read_counts(directory: str | os.PathLike[str]) -> Counts:
    """The counts that `write` left in `directory`.

    Raises:
        FileNotFoundError: the directory was not written by `write`.
    """
    stored: dict[str, Any] = json.loads((Path(directory) / COUNTS_FILE).read_text())
    return Counts(**stored)


def main(arguments: list[str] | None = None) -> None:
    """Command line: generate, write, print the counts."""
    parser = argparse.ArgumentParser(description="Generate the changelogs of the join benchmarks.")
    parser.add_argument("directory")
    parser.add_argument("--changes", type=int, default=2_000_000, help="both inputs together")
    parser.add_argument("--share", type=float, default=0.2, help="share of updates and deletes")
    parser.add_argument("--files", type=int, default=20, help="files per input")
    parser.add_argument("--no-unique-key", action="store_true", help="several rows per order_id")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(arguments)
    changes = generate(given.changes, given.share, unique_key=not given.no_unique_key, seed=given.seed)
    print(json.dumps(asdict(write(changes, given.directory, given.files)), indent=2))


if __name__ == "__main__":
    main()
