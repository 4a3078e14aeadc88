"""State eight times as large as memory: a micro-batch's time over that of the same with all of the state in memory.

Two engines in processes of their own have the same state, and take the same micro-batches in turns. One has all the
memory that it wants; the other runs in a memory cgroup (version 1 or 2, which this has to be allowed to make), that
leaves it an eighth of the state's size, and 96 MiB to work in, beyond what the process takes without state, and moves
the rest to local disk.

- `join`: a left join. Its state are orders of about 150 bytes; a micro-batch brings payments, each of one order, whose
  row with nulls is retracted and which comes out with the payment.
- `aggregate`: count and sum of amounts by customer, name and address, about 130 bytes; a micro-batch brings rows of
  customers that there are.

How much of that is the disk is told by the number of pages read, and by how many a second it gives when nothing else is
done, of a file of its own.

`uniform`: any order or customer is as likely as another. `recent`: nine in ten are among the newest tenth. What both
engines say is folded to a sum of hashes and compared with DuckDB's result of the same rows.

    python -m benchmarks.large_state [--rows 2000000] [--batch 20000] [--batches 12] [--times 8] [--folder FOLDER]
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from benchmarks.common import arguments, interleave, ratio, record, summarise
from gpu_ops.descriptions.aggregate import Aggregate
from gpu_ops.descriptions.description import Description
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import normalize_on
from gpu_ops.files.disk import Disk, File, local_folders
from gpu_ops.join_engine import JoinEngine
from gpu_ops.memory import Budget

OPERATORS = ("join", "aggregate")
KEYS = ("uniform", "recent")
STATE_PART = 0.7
"""The part of what memory there is that state may take: the rest is for a micro-batch, and for pages read back."""
_WORK = 96 << 20
"""Bytes for a micro-batch, what comes of it, how both travel here, and what allocators keep, whatever the state."""
_LOAD = 20_000
_WARMUP = 3
_FAR = 8192
"""Pages that are read to see what the disk gives."""
_CGROUPS = Path("/sys/fs/cgroup")

Rows = dict[str, Any]


def wide(keys: npt.NDArray[np.int64]) -> Rows:
    """Columns that follow from a key."""
    text = pa.array([f"{key * 7919:019d} Long Street, House {key % 997:04d}" for key in keys.tolist()], pa.string())
    name = pa.array([f"customer {key:012d} of many" for key in keys.tolist()], pa.string())
    return {"k": keys, "name": name, "address": text}


def orders(keys: npt.NDArray[np.int64]) -> pa.Table:
    """An order for each key."""
    return pa.table(
        {
            **wide(keys),
            **{f"n{number}": keys * (number + 3) for number in range(5)},
            "price": keys / 8,
            "at": pa.array(keys + 1_700_000_000_000_000, pa.timestamp("us")),
        }
    )


def payments(keys: npt.NDArray[np.int64], number: int) -> pa.Table:
    """A payment for each key, of a micro-batch."""
    return pa.table({"k": keys, "amount": (keys * 31 + number) % 1000, "batch": np.full(keys.size, number)})


def customers(keys: npt.NDArray[np.int64], number: int) -> pa.Table:
    """A row of each customer, in a micro-batch."""
    return pa.table({**wide(keys), "amount": (keys * 31 + number) % 1000})


def chosen(kind: str, rows: int, count: int, number: int) -> npt.NDArray[np.int64]:
    """The keys of a micro-batch."""
    rng = np.random.default_rng([number, KEYS.index(kind)])
    keys = rng.integers(0, rows, count)
    if kind == "recent":
        hot = rng.random(count) < 0.9
        keys[hot] = rng.integers(rows - rows // 10, rows, int(hot.sum()))
    return keys


def description(operator: str) -> Description:
    """The description of the operator that is measured."""
    none = np.empty(0, np.int64)
    if operator == "join":
        sides = Input("orders", orders(none).schema), Input("payments", payments(none, 0).schema)
        return Join("left", *sides, normalize_on("k"), emit="per_batch")
    source = Input("rows", customers(none, 0).schema)
    calls = {"n": "count(*)", "total": "sum(amount)"}
    return Aggregate.of(source, ("k", "name", "address"), calls, "per_batch")


def folded(table: pa.Table, columns: list[str]) -> int:
    """A sum of hashes over rows, in any order; retracted ones count negatively."""
    total = np.zeros(table.num_rows, np.uint64)
    for place, name in enumerate(columns):
        column = table.column(name)
        if pa.types.is_temporal(column.type):
            column = column.cast(pa.int64())
        values = column.to_pandas()
        if values.dtype.kind in "if":
            values = values.astype(np.float64)
        hashes = pd.util.hash_pandas_object(values.reset_index(drop=True), index=False).to_numpy()
        total += hashes * np.uint64(2 * place + 3) ^ (hashes >> np.uint64(7 + place))
    if "row_kind" in table.column_names:
        gone = np.isin(table.column("row_kind").to_numpy(zero_copy_only=False), ["-U", "-D"])
        total[gone] = -total[gone]
    return int(total.sum())


def batch_of(operator: str, kind: str, options: Any, number: int) -> dict[str, pa.Table]:
    """A micro-batch, by input."""
    keys = chosen(kind, options.rows, options.batch, number)
    return {"payments": payments(keys, number)} if operator == "join" else {"rows": customers(keys, number)}


def parts(operator: str, rows: int) -> Iterator[dict[str, pa.Table]]:
    """Yields the rows of the initial state in parts."""
    for first in range(0, rows, _LOAD):
        keys = np.arange(first, min(rows, first + _LOAD))
        yield {"orders": orders(keys)} if operator == "join" else {"rows": customers(keys, -1)}


class Group:
    """A memory cgroup; `processes` is its file of those that are in it, and of all that they start."""

    def __init__(self) -> None:
        own = Path("/proc/self/cgroup").read_text().splitlines()
        names = {kinds: path for _, kinds, path in (line.split(":", 2) for line in own)}
        old = "memory" in names
        base = _CGROUPS / "memory" if old else _CGROUPS
        self.folder = base / names["memory" if old else ""].lstrip("/") / f"large_state_{uuid.uuid4().hex[:8]}"
        if not self.folder.parent.is_dir():
            self.folder = base / self.folder.name
        self._limit = "memory.limit_in_bytes" if old else "memory.max"
        self._usage = "memory.usage_in_bytes" if old else "memory.current"
        self._most = "memory.max_usage_in_bytes" if old else "memory.peak"
        self._files = ("total_cache", "total_mapped_file") if old else ("file", "file_mapped")
        self.folder.mkdir()
        self.processes = self.folder / "cgroup.procs"

    def used(self) -> int:
        """Bytes, without what the system keeps of files that no process has mapped."""
        stat = dict(line.split() for line in (self.folder / "memory.stat").read_text().splitlines())
        files, mapped = (int(stat[name]) for name in self._files)
        return int((self.folder / self._usage).read_text()) - files + mapped

    def limit(self, more: int) -> int:
        """Allow so much more than what is used; how much that is in all."""
        allowed = self.used() + more
        (self.folder / self._limit).write_text(str(allowed))
        return allowed

    def most(self) -> int:
        """The most that was ever used."""
        return int((self.folder / self._most).read_text())

    def close(self) -> None:
        """Remove it, once its processes have ended; they have a minute."""
        deadline = time.monotonic() + 60
        while self.processes.read_text() and time.monotonic() < deadline:
            time.sleep(0.1)
        self.folder.rmdir()


def sent(tables: dict[str, pa.Table]) -> dict[str, bytes]:
    """Tables as they travel."""
    found = {}
    for name, table in tables.items():
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        found[name] = sink.getvalue().to_pybytes()
    return found


def received(tables: dict[str, bytes]) -> dict[str, pa.Table]:
    """The inverse of `sent`."""
    return {name: pa.ipc.open_stream(data).read_all() for name, data in tables.items()}


def served(pipe: Any, operator: str, folder: str | None) -> None:
    """An engine in this process: it takes what comes, until None does.

    Args:
        pipe: of what comes, and what came of it.
        operator: what runs.
        folder: on disk.
    """
    group: Group | None = None
    engine = JoinEngine(description(operator), "cpu")
    while (told := pipe.recv()) is not None:
        if told == "group":
            group = Group()
            group.processes.write_text(str(os.getpid()))
        elif isinstance(told, int):
            engine.close()
            gc.collect()
            assert group is not None
            group.limit(told + _WORK)
            budget = Budget(host=int(told * STATE_PART), folder=folder)
            engine = JoinEngine(description(operator), "cpu", memory_limit=budget)
        elif told == "size":
            pipe.send(sum(value for name, value in engine.state_size().items() if name.endswith("_bytes")))
        else:
            given = received(told)
            started = time.perf_counter()
            batch = engine.prepare(**given)
            engine.commit()
            took = time.perf_counter() - started
            metrics = {name: value for name, value in batch.metrics.items() if "disk" in name}
            pipe.send(({"seconds": took, **metrics}, sent({"changelog": batch.changelog})))
    if group is not None:
        pipe.send(group.most())
        (group.folder.parent / "cgroup.procs").write_text(str(os.getpid()))
        group.close()


class Engine:
    """An engine in another process.

    Args:
        operator: what runs.
        folder: on disk.
    """

    def __init__(self, operator: str, folder: str | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=served, args=(theirs, operator, folder), daemon=True)
        self._process.start()
        theirs.close()
        self._columns = [name for name in description(operator).output_schema.names if name != "row_kind"]
        self.folded, self.number = 0, 0

    def process(self, tables: dict[str, pa.Table]) -> dict[str, float]:
        """Take a micro-batch in; what was measured."""
        self._pipe.send(sent(tables))
        measures, answer = self._pipe.recv()
        self.folded += folded(received(answer)["changelog"], self._columns)
        found: dict[str, float] = measures
        return found

    def limit(self, memory: int, warmup: list[dict[str, pa.Table]]) -> None:
        """Begin anew, with so much memory beyond what the process takes without state."""
        self._pipe.send("group")
        for tables in warmup:
            self.process(tables)
        self._pipe.send(memory)
        self.folded = 0

    def size(self) -> int:
        """The bytes of state of the process."""
        self._pipe.send("size")
        found: int = self._pipe.recv()
        return found

    def close(self, *, limited: bool = False) -> int:
        """End the process; the most memory that it took where that was limited."""
        self._pipe.send(None)
        most: int = self._pipe.recv() if limited else 0
        self._process.join()
        return most


def expected(operator: str, kind: str, options: Any) -> int:
    """The number of rows that DuckDB has for the same input, folded."""
    base = duckdb.connect()
    pays = [next(iter(batch_of(operator, kind, options, n + 1).values())) for n in range(options.batches + _WARMUP)]
    state = pa.concat_tables(next(iter(part.values())) for part in parts(operator, options.rows))
    more = pa.concat_tables(pays)
    columns = [name for name in description(operator).output_schema.names if name != "row_kind"]
    base.register("state", state)
    base.register("more", more)
    if operator == "join":
        text = "select o.*, p.amount, p.batch from state o left join more p on o.k = p.k"
    else:
        text = (
            "select k, name, address, count(*)::bigint as n, sum(amount)::bigint as total"
            " from (select * from state union all select * from more) group by k, name, address"
        )
    found, total = base.sql(text).to_arrow_reader(1 << 18), 0
    for batch in found:
        table = pa.Table.from_batches([batch])
        total += folded(table.rename_columns(columns), columns)
    return total % (1 << 64)


def measured(operator: str, kind: str, options: Any) -> dict[str, Any]:
    """Both engines, a micro-batch of each in turns."""
    roomy, small = Engine(operator, None), Engine(operator, options.folder)
    for part in parts(operator, options.rows):
        roomy.process(part)
    size = roomy.size()
    small.limit(size // options.times, [next(parts(operator, _LOAD)), batch_of(operator, kind, options, 0)])
    for part in parts(operator, options.rows):
        small.process(part)

    def turn(engine: Engine) -> dict[str, float]:
        engine.number += 1
        return engine.process(batch_of(operator, kind, options, engine.number))

    cases = {"in_memory": lambda: turn(roomy), "on_disk": lambda: turn(small)}
    runs = interleave(cases, options.batches, warmup=_WARMUP)
    most = [roomy.close(), small.close(limited=True)][-1]
    seconds = {name: summarise(run["seconds"] for run in of) for name, of in runs.items()}
    times = ratio(seconds["on_disk"], seconds["in_memory"])
    print(f"{operator}-{kind}: {times['median']:.2f} times; comparing", file=sys.stderr, flush=True)
    wanted = expected(operator, kind, options)
    assert [engine.folded % (1 << 64) for engine in (roomy, small)] == [wanted, wanted], "the results differ"
    last = runs["on_disk"][-1]
    return {
        "state_bytes": size,
        "most_memory_bytes": most,
        "disk_bytes": sum(value for name, value in last.items() if name.endswith("_disk_bytes")),
        "pages_read": summarise(run["disk_pages_read"] for run in runs["on_disk"]).median,
        "written_bytes": summarise(run["disk_written_bytes"] for run in runs["on_disk"]).median,
        "seconds": seconds,
        "times": times,
    }


def pages_a_second(folder: str | None) -> float:
    """Measures how many pages per second the idle disk reads at random places, as rows are read."""
    folders, rng, apart = local_folders(folder), np.random.default_rng(0), 16
    disk = Disk(folders)
    with tempfile.TemporaryFile(dir=folders[0]) as file:
        rows = File(disk, os.dup(file.fileno()))
        for _ in range(_FAR // apart):
            rows.append(rng.integers(0, 256, apart * mmap.PAGESIZE * apart, np.uint8))
        seconds = []
        for _ in range(5):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            pages = np.arange(_FAR) * apart + rng.integers(0, apart - 4, _FAR)
            first, before, started = pages * mmap.PAGESIZE, disk.pages_read, time.perf_counter()
            rows.gather(first, first + mmap.PAGESIZE)
            seconds.append((time.perf_counter() - started) / (disk.pages_read - before))
    return 1 / summarise(seconds).median


def main() -> None:
    """Measure all, print and record."""
    parser = arguments(__doc__, "large_state")
    parser.add_argument("--rows", type=int, default=2_000_000, help="of state")
    parser.add_argument("--batch", type=int, default=20_000, help="rows of a micro-batch")
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--times", type=int, default=8, help="as much state as memory")
    parser.add_argument("--folder", help="on the disk; Spark's local folders, or the temporary one, by default")
    parser.add_argument("--only", nargs="+", help="such as join-uniform")
    options = parser.parse_args()
    results: dict[str, Any] = {"disk_pages_a_second": round(pages_a_second(options.folder))}
    print(results, file=sys.stderr, flush=True)
    for operator in OPERATORS:
        for kind in KEYS:
            name = f"{operator}-{kind}"
            if options.only and name not in options.only:
                continue
            found = results[name] = measured(operator, kind, options)
            print(name, {k: v for k, v in found.items() if k != "seconds"}, file=sys.stderr, flush=True)
    record(options, "large_state", results)


if __name__ == "__main__":
    main()
