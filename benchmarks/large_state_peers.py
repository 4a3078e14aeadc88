"""A left join with 8 times as much state as memory: ours on Spark, Flink SQL on RocksDB, Spark's own on RocksDB.

Orders and payments are those of `large_state`, here in CSV files that all read: all orders come first, and then micro-
batches of payments, each of one order. Each system is in a memory cgroup of its own with all of its processes; the
heap of its JVM is 1 GiB, whose pages are there from the start. An eighth of the orders' bytes in Arrow is the memory
for state: of that, `large_state`'s part is what ours may hold of its state, and what RocksDB may take for blocks and
write buffers, each by its own settings. The rest is left to what the system keeps of files: when all orders are there
and a turn of payments is done, the cgroup is limited to what is used then without files, that rest, and `_WORK` in
case more is needed for work. What each takes for work is its own affair, and on record: what was used then, and before
with a few rows of state. Loading is not limited but by those settings. All have the same disk.

- `ours`: `gpu_ops.join` of `read_files`, two state servers, durable after each micro-batch.
- `flink`: a left join in SQL, parallelism 2, the key of the orders declared, no checkpoints. `flink_checkpoints`: with
  incremental ones, every `_CHECKPOINTS`. It takes event by event; its time of a micro-batch is that of as many rows.
- `spark_left`: Spark's own join takes no changes, and an outer one wants times: each payment has that of its order, and
  an hour is allowed between them. It gives only inserts: orders with their payments, and nulls when the watermark has
  passed an order, which here it never does. As it looks through all state in each micro-batch for what that is, it is
  given ten files of orders in each, and a single micro-batch in a turn. `spark_inner` is its inner join, which wants no
  watermark and looks for nothing.

Files come while queries run. Times are from when they are there to when the system says that it is done with their
rows (it looks for new ones every 50 ms), over the number of micro-batches of a turn; the systems take turns, while the
others wait with all that they hold. The rows of each, folded to their number and a sum over all columns, are DuckDB's:
those of the left join, or for Spark's own those of the inner one.

    python -m benchmarks.large_state_peers [--rows 2000000] [--rounds 3] [--turn 4] [--times 8] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
from pyarrow import csv

from benchmarks.common import arguments, interleave, next_event, ratio, record, summarise
from benchmarks.flink.run import FLINK_VERSION, SOURCE, flink_command
from benchmarks.large_state import KEYS, STATE_PART, Group, chosen, orders, payments

PEERS = ("ours", "flink", "flink_checkpoints", "spark_left", "spark_inner")
_WORK = 64 << 20
"""Bytes that each may take more than it does when it is limited."""
_CHECKPOINTS = "10 s"
_HEAP = "1g"
_LOAD = 50_000
"""Orders in a micro-batch."""
_LOOK = "50 ms"
_WARM = {"orders": 4, "payments": 6}
"""Micro-batches of each input, of a query before that which is measured."""

COLUMNS = {
    "orders": {
        "k": "BIGINT",
        "name": "STRING",
        "address": "STRING",
        **{f"n{number}": "BIGINT" for number in range(5)},
        "price": "DOUBLE",
        "at": "TIMESTAMP",
    },
    "payments": {"k": "BIGINT", "amount": "BIGINT", "batch": "BIGINT"},
}
SUM = (
    "k + 3 * cast(substring(name, 10, 12) AS BIGINT) + 5 * cast(substring(address, 1, 19) AS BIGINT)"
    " + 7 * cast(right(address, 4) AS BIGINT) + 11 * n0 + 13 * n1 + 17 * n2 + 19 * n3 + 23 * n4"
    " + 29 * cast(price * 8 AS BIGINT) + 31 * second(`at`) + 37 * coalesce(amount, -1) + 41 * coalesce(batch, -1)"
)
"""Of a row of the result: in Spark's SQL, in DuckDB's, and in `FlinkLargeState.java`."""

FLINK = """
CREATE TABLE orders (k BIGINT, name STRING, address STRING, n0 BIGINT, n1 BIGINT, n2 BIGINT, n3 BIGINT, n4 BIGINT,
  price DOUBLE, `at` TIMESTAMP(6), PRIMARY KEY (k) NOT ENFORCED) WITH (
  'connector' = 'filesystem', 'format' = 'csv', 'path' = '{folder}/orders', 'source.monitor-interval' = '{look}')

CREATE TABLE payments (k BIGINT, amount BIGINT, `batch` BIGINT) WITH (
  'connector' = 'filesystem', 'format' = 'csv', 'path' = '{folder}/payments', 'source.monitor-interval' = '{look}')

SELECT o.*, p.amount, p.`batch` FROM orders o LEFT JOIN payments p ON o.k = p.k
"""


def save(folder: Path, name: str, number: int, table: pa.Table) -> None:
    """Writes a table as one CSV file."""
    folder.mkdir(parents=True, exist_ok=True)
    csv.write_csv(table, folder / f"{name}-{number:06d}.csv", csv.WriteOptions(include_header=False))


def write(folder: Path, options: argparse.Namespace) -> int:
    """All files: orders, and payments by the number of their micro-batch, and of both some to begin with.

    Returns:
        The orders' bytes in Arrow.
    """
    size, each = 0, options.turn * (options.rounds + 2)
    for first in range(0, options.rows, _LOAD):
        table = orders(np.arange(first, min(first + _LOAD, options.rows)))
        save(folder / "orders", "all", first // _LOAD, table)
        size += table.nbytes
    for number in range(len(KEYS) * each):
        kind = KEYS[number // each]
        save(folder / "payments", kind, number, payments(chosen(kind, options.rows, options.batch, number), number))
    for number in range(_WARM["orders"]):
        save(folder / "warm" / "orders", "all", number, orders(np.arange(number * _LOAD, (number + 1) * _LOAD)))
    for number in range(_WARM["payments"]):
        keys = chosen("uniform", _WARM["orders"] * _LOAD, options.batch, number)
        save(folder / "warm" / "payments", "all", number, payments(keys, number))
    return size


def expected(folder: Path, how: str) -> tuple[int, int]:
    """DuckDB's answer over the files that a system was given: the number of rows, and their sum."""
    con = duckdb.connect()
    for side, columns in COLUMNS.items():
        types = {name: "VARCHAR" if kind == "STRING" else kind for name, kind in columns.items()}
        con.read_csv(f"{folder}/{side}/*.csv", header=False, columns=types).create_view(side)
    rows = con.view("orders").join(con.view("payments"), "k", how)
    (found,) = rows.aggregate(f"count(*), sum({SUM.replace('`', chr(34))})").fetchall()
    return int(found[0]), int(found[1])


class Peer:
    """A system in a process and a cgroup of its own, warm.

    Args:
        name: one of `PEERS`.
        data: all files.
        work: a new folder.
        memory: bytes for state.
        batch: payments in a micro-batch.
    """

    def __init__(self, name: str, data: Path, work: Path, memory: int, batch: int) -> None:
        self.name, self.folder, self._data, self._given = name, work, data, 0
        for side in COLUMNS:
            (work / side).mkdir(parents=True)
        shutil.copytree(data / "warm", work / "warm")
        start = flink(name, work, memory, batch) if name.startswith("flink") else sparks(name, work, memory)
        self.group = Group()
        into = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.group.processes)]
        environment = os.environ | {"SPARK_LOCAL_DIRS": str(work / "temporary")}
        self._process = subprocess.Popen(
            [*into, *start], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        next_event(self._process, "warm")
        self.idle, self._files = self.group.used(), int(memory * (1 - STATE_PART))
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def give(self, side: str, kind: str, count: int) -> float:
        """The next files of an input; how many seconds until it is done with them."""
        there = {file.name for file in (self.folder / side).iterdir()}
        files = [file for file in sorted((self._data / side).glob(f"{kind}-*")) if file.name not in there][:count]
        began = time.perf_counter()
        for file in files:
            os.link(file, self.folder / side / file.name)
        self._given += sum(map(rows_of, files))
        while next_event(self._process, "rows")["came"] < self._given:
            pass
        return time.perf_counter() - began

    def load(self) -> float:
        """All orders; seconds, without those of the first file, in which the query starts."""
        self.give("orders", "all", 1)
        return self.give("orders", "all", 1 << 30)

    def turn(self, kind: str, count: int) -> float:
        """The next micro-batches of payments; seconds of one."""
        count = 1 if self.name == "spark_left" else count
        return self.give("payments", kind, count) / count

    def limit(self) -> dict[str, int]:
        """Leave it what it uses, and a little for files; how much that is, in bytes."""
        os.sync()  # what is to be written cannot be dropped
        used = self.group.used()
        return {"idle_bytes": self.idle, "used_bytes": used, "limit_bytes": self.group.limit(self._files + _WORK)}

    def end(self) -> tuple[int, int]:
        """End it; the number of rows of its result, and their sum."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        found = next_event(self._process, "end")
        self._process.wait()
        return found["rows"], found["sum"]

    def close(self) -> None:
        """End its process, if it has not ended, and remove the cgroup."""
        self._process.kill()
        self._process.wait()
        self.group.close()


@functools.cache
def rows_of(file: Path) -> int:
    """Rows of a CSV file."""
    return file.read_bytes().count(b"\n")


def flink(name: str, work: Path, memory: int, batch: int) -> list[str]:
    """The command that starts Flink."""
    settings = {
        "state.backend.type": "rocksdb",
        "state.backend.rocksdb.localdir": str(work / "temporary"),
        "state.backend.rocksdb.use-bloom-filter": "true",
        "state.backend.rocksdb.writebuffer.size": "4mb",
        "taskmanager.memory.managed.size": f"{int(memory * STATE_PART)}b",
        "pipeline.object-reuse": "true",
        "table.exec.state.ttl": "0",
    }
    if name == "flink_checkpoints":
        settings |= {
            "execution.checkpointing.interval": _CHECKPOINTS,
            "execution.checkpointing.incremental": "true",
            "execution.checkpointing.storage": "filesystem",
            "execution.checkpointing.dir": (work / "checkpoint").as_uri(),
        }
    for of in ("warm", "."):
        (work / of / "query.sql").write_text(FLINK.format(folder=work / of, look=_LOOK).strip())
    command = flink_command(SOURCE.with_name("FlinkLargeState.java"), _HEAP, FLINK_VERSION)
    files = [str(work / "warm" / "query.sql"), str(work / "query.sql")]
    every = math.gcd(batch, _LOAD)
    return [
        *command,
        "2",
        str(every),
        str(_WARM["payments"] * batch),
        *files,
        *(f"{key}={value}" for key, value in settings.items()),
    ]


def sparks(name: str, work: Path, memory: int) -> list[str]:
    """The command that starts Spark, with our join or its own."""
    return [sys.executable, "-m", "benchmarks.large_state_peers", "--serve", name, str(work), str(memory)]


def serve(name: str, work: Path, memory: int) -> None:
    """The process of a system on Spark."""
    from pyspark.sql.streaming import StreamingQueryListener

    from benchmarks.spark_queries import local_session
    from benchmarks.vs_spark import FORMAT, STORES, rows_in

    part = int(memory * STATE_PART)
    store, rocksdb = "spark.sql.streaming.stateStore", "spark.sql.streaming.stateStore.rocksdb"
    spark = local_session(**{
        "spark.driver.memory": _HEAP,
        "spark.driver.extraJavaOptions": f"-Xms{_HEAP} -XX:+AlwaysPreTouch",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.streaming.pollingDelay": _LOOK.replace(" ", ""),
        "spark.gpu_ops.memory.host": str(part // 2),
        f"{store}.providerClass": f"{STORES}RocksDBStateStoreProvider",
        "spark.sql.streaming.join.stateFormatVersion": FORMAT,
        f"{rocksdb}.changelogCheckpointing.enabled": "true",
        f"{rocksdb}.trackTotalNumberOfRows": "false",
        f"{rocksdb}.boundedMemoryUsage": "true",
        f"{rocksdb}.maxMemoryUsageMB": str(max(1, part >> 20)),
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    })  # fmt: skip
    came, rows, total = 0, 0, 0

    class Listener(StreamingQueryListener):
        def onQueryStarted(self, event: Any) -> None:  # noqa: N802 - Spark calls it so
            pass

        def onQueryProgress(self, event: Any) -> None:  # noqa: N802
            nonlocal came, rows, total
            progress = json.loads(event.progress.json)
            came += rows_in(progress)
            found = progress["observedMetrics"].get("out")
            if found is not None:
                rows, total = rows + (found["rows"] or 0), total + (found["sum"] or 0)
            print(json.dumps({"event": "rows", "came": came}), flush=True)

        def onQueryTerminated(self, event: Any) -> None:  # noqa: N802
            pass

    def start(folder: Path, **trigger: Any) -> Any:
        writer = joined(name, spark, folder).writeStream.format("noop")
        return writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(**trigger).start()

    start(work / "warm", availableNow=True).awaitTermination()
    time.sleep(11)  # state servers are told that it is over when they are next looked at, every 5 s
    print(json.dumps({"event": "warm"}), flush=True)
    sys.stdin.readline()
    spark.streams.addListener(Listener())
    query = start(work, processingTime="0 seconds")

    def watch() -> None:
        try:
            query.awaitTermination()
        except Exception as error:  # whatever it is, or the JVM is gone
            print(error, file=sys.stderr, flush=True)
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    sys.stdin.read()
    query.stop()
    print(json.dumps({"event": "end", "rows": rows, "sum": total}), flush=True)
    spark.stop()


def joined(name: str, spark: Any, folder: Path) -> Any:
    """The query, whose rows are counted and summed."""
    from pyspark.sql import functions as f

    import gpu_ops

    schemas = [", ".join(f"`{column}` {kind}" for column, kind in columns.items()) for columns in COLUMNS.values()]
    paths = [str(folder / side) for side in COLUMNS]
    if name == "ours":
        left, right = (
            gpu_ops.read_files(spark, path, "csv", schema, maxFilesPerTrigger=1)
            for path, schema in zip(paths, schemas, strict=True)
        )
        found = gpu_ops.join(left, right, on="k", how="left", emit="per_batch", state=str(folder / "state"))
    else:
        files = 10 if name == "spark_left" else 1, 1
        left, right = (
            spark.readStream.schema(schema).option("maxFilesPerTrigger", count).csv(path)
            for path, schema, count in zip(paths, schemas, files, strict=True)
        )
        if name == "spark_left":
            left = left.withWatermark("at", "1 hour")
            paid = right.withColumn("paid", f.expr("timestamp_micros(k + 1700000000000000)"))
            right = paid.withColumnRenamed("k", "order").withWatermark("paid", "1 hour")
            close = f.expr("k = order AND paid BETWEEN at AND at + INTERVAL 1 HOUR")
            found = left.join(right, close, "leftOuter")
        else:
            found = left.join(right, "k")
        found = found.withColumn("row_kind", f.lit("+I"))
    sign = "if(row_kind IN ('-U', '-D'), -1, 1)"
    return found.observe("out", f.expr(f"sum({sign}) AS rows"), f.expr(f"sum({sign} * ({SUM})) AS sum"))


def main() -> None:
    """Run, check, print, record."""
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
        return
    parser = arguments(__doc__, "large_state_peers", rounds=3)
    parser.add_argument("--rows", type=int, default=2_000_000, help="orders; an eighth holds a micro-batch")
    parser.add_argument("--batch", type=int, default=20_000, help="payments in a micro-batch")
    parser.add_argument("--turn", type=int, default=4, help="micro-batches in a turn")
    parser.add_argument("--times", type=int, default=8, help="as many bytes of orders as memory")
    parser.add_argument("--folder", help="on the disk; the temporary one by default")
    parser.add_argument("--only", nargs="+", choices=PEERS, default=list(PEERS))
    options = parser.parse_args()
    assert options.rows % _LOAD == 0, f"a multiple of {_LOAD}"
    temporary = tempfile.TemporaryDirectory(prefix="gpu-join-peers-", dir=options.folder)
    with temporary as name, contextlib.ExitStack() as stack:
        results = measured(Path(name), options, stack)
    record(options, "large_state_peers", results, "folder", flink=FLINK_VERSION, heap=_HEAP, work=_WORK)


def measured(folder: Path, options: argparse.Namespace, stack: contextlib.ExitStack) -> dict[str, Any]:
    """All systems, a turn of each after the other; what they run in is closed with the stack."""
    data = folder / "data"
    data.mkdir()
    size = write(data, options)
    memory, peers, found = size // options.times, dict[str, Peer](), dict[str, dict[str, Any]]()
    for name in options.only:
        peer = peers[name] = Peer(name, data, folder / name, memory, options.batch)
        stack.callback(peer.close)
        found[name] = {"load_seconds": peer.load()}
        peer.turn(KEYS[0], options.turn)
        found[name] |= peer.limit()
        print(name, found[name], file=sys.stderr, flush=True)
    for kind in KEYS:
        cases = {name: functools.partial(peer.turn, kind, options.turn) for name, peer in peers.items()}
        for name, seconds in interleave(cases, options.rounds, warmup=1).items():
            found[name][kind] = summarise(seconds)
            print(kind, name, found[name][kind], file=sys.stderr, flush=True)
    for name, peer in peers.items():
        found[name]["used_at_end_bytes"] = peer.group.used()
        said, right = peer.end(), expected(peer.folder, "inner" if name.startswith("spark") else "left")
        if said != right:
            raise SystemExit(f"{name}: {said} rows and sum, {right} expected")
    over = {
        name: {kind: ratio(found[name][kind], found["ours"][kind]) for kind in KEYS}
        | {"load": found[name]["load_seconds"] / found["ours"]["load_seconds"]}
        for name in found
        if name != "ours" and "ours" in found
    }
    return {"orders_bytes": size, "memory_bytes": memory, "seconds_over_ours": over, "peers": found}


if __name__ == "__main__":
    main()
