"""Sources of small files, a sink in memory, and joins computed the slow way."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gpu_ops

Row = tuple[Any, ...]


class Source:
    """A folder of JSON files, each of which is a micro-batch."""

    read_by_arrow = False

    def __init__(self, spark: Any, folder: Path, schema: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._spark, self._folder, self._schema = spark, folder, schema
        self.files: list[list[dict[str, Any]]] = []
        self._written_ms = 0

    @property
    def changes(self) -> list[dict[str, Any]]:
        """All of them, in order."""
        return [change for file in self.files for change in file]

    @property
    def df(self) -> Any:
        if self.read_by_arrow:
            return gpu_ops.read_files(self._spark, str(self._folder), "json", self._schema, maxFilesPerTrigger=1)
        reader = self._spark.readStream.schema(self._schema).option("maxFilesPerTrigger", 1)
        return reader.json(str(self._folder))

    def add(self, *changes: dict[str, Any]) -> None:
        """One file, so one micro-batch."""
        self.files.append(list(changes))
        path = self._folder / f"{len(self.files):04d}.json"
        temporary = path.with_name("." + path.name)
        temporary.write_text("\n".join(json.dumps(c) for c in changes))
        # Spark takes files by their time, in milliseconds, and the system's clock of files may stand still longer
        self._written_ms = max(time.time_ns() // 1_000_000, self._written_ms + 1)
        os.utime(temporary, ns=(self._written_ms * 1_000_000,) * 2)
        temporary.rename(path)

    def cut(self, files: int) -> None:
        """Takes files away but for the first so many."""
        for number in range(files, len(self.files)):
            (self._folder / f"{number + 1:04d}.json").unlink()
        del self.files[files:]

    def table(self, columns: Sequence[str], kind: str | None = "op", files: int | None = None) -> list[Row]:
        """The folded changes, of all files or of the first so many."""
        changes = [change for file in self.files[:files] for change in file]
        rows = [(c.get(kind, "+I") if kind else "+I", *(c.get(n) for n in columns)) for c in changes]
        return fold(rows)


def fold(changes: Iterable[Row]) -> list[Row]:
    """The table that a changelog makes, sorted; the row kind is the first column."""
    count: Counter[Row] = Counter()
    for kind, *row in changes:
        count[tuple(row)] += 1 if kind in ("+I", "+U") else -1
        assert count[tuple(row)] >= 0, f"{kind} of a row that is not there: {row}"
    return sorted(count.elements(), key=repr)


def certificate(folder: Path, name: str) -> tuple[str, str] | None:
    """A certificate for a name, signed by itself, and its key; None where there is no openssl to make one."""
    if shutil.which("openssl") is None:
        return None
    made, key = folder / f"{name}.pem", folder / f"{name}.key"
    subject = ["-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}"]
    usage = ["-addext", "keyUsage=digitalSignature,keyCertSign", "-days", "2", "-nodes"]
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", *subject, *usage]
    subprocess.run([*command, "-keyout", str(key), "-out", str(made)], check=True, capture_output=True)
    return str(made), str(key)


class Sink:
    """Collects micro-batches; one that comes again replaces what it was."""

    def __init__(self) -> None:
        self.batches: dict[int, list[Row]] = {}

    def __call__(self, df: Any, batch_id: int) -> None:
        self.batches[batch_id] = [tuple(r) for r in df.collect()]

    @property
    def changes(self) -> list[Row]:
        return [row for batch in sorted(self.batches) for row in self.batches[batch]]

    @property
    def table(self) -> list[Row]:
        return fold(self.changes)


def drain(df: Any, sink: Callable[[Any, int], None], checkpoint: Path) -> Any:
    """Runs a query until its sources are exhausted; gives the query."""
    query = start(df, sink, checkpoint, availableNow=True)
    query.awaitTermination()
    return query


def start(df: Any, sink: Callable[[Any, int], None], checkpoint: Path, **trigger: Any) -> Any:
    writer = df.writeStream.foreachBatch(sink).option("checkpointLocation", str(checkpoint))
    return (writer.trigger(**trigger) if trigger else writer).start()


def in_memory(make: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A join without a state folder, without the warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", gpu_ops.MemoryOnlyStateWarning)
        return make(*args, **options)


def slow_join(how: str, left: list[Row], right: list[Row], width: int, on: int = 0) -> list[Row]:
    """A join of two tables by their column ``on``; the right table has ``width`` columns, its key first."""
    out: list[Row] = []
    for row in left:
        found = [r for r in right if row[on] is not None and r[0] == row[on]]
        if how in ("semi", "anti"):
            out += [row] if bool(found) == (how == "semi") else []
        elif found:
            out += [row + r[1:] for r in found]
        elif how == "left":
            out.append(row + (None,) * (width - 1))
    return sorted(out, key=repr)


@contextlib.contextmanager
def settings(spark: Any, **values: str) -> Iterator[None]:
    """A session with other settings, for as long as this lasts."""
    named = {
        "spark.sql.session.timeZone": values.get("zone"),
        "spark.sql.ansi.enabled": values.get("ansi"),
        "spark.sql.codegen.wholeStage": values.get("codegen"),
        "spark.sql.codegen.factoryMode": "NO_CODEGEN" if "codegen" in values else None,
    }
    before = {name: spark.conf.get(name, None) for name, value in named.items() if value is not None}
    for name in before:
        spark.conf.set(name, named[name])
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                spark.conf.unset(name)
            else:
                spark.conf.set(name, value)
