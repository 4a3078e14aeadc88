"""The calendar by which Parquet files count days: today's, or the Julian one before 1582-10-15, as Spark 2 wrote.

Spark says in a file's metadata which it is, and rebases when it reads: a date stays the same year, month and day, and
an instant the same local time in the zone that it was written in. The rules are Spark's
(``DataSourceUtils.datetimeRebaseSpec`` and ``RebaseDateTime``). How zones counted before 1900 is in a table that is
part of Spark (`_ZONES`), and is read from there.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.arrays import Ints
from gpu_ops.files.columns import WrongError
from gpu_ops.values import arrow_zone

GREGORIAN: Final = -141427
"""The first day of the Gregorian calendar, 1582-10-15, as days from 1970."""

STANDARD_TIME: Final = -2_208_988_800_000_000
"""1900-01-01, in microseconds from 1970: from then on all zones count alike in Java and elsewhere."""

_DAY: Final = 86_400_000_000
_BEGINS: Final = np.array([
    -719164, -682945, -646420, -609895, -536845, -500320, -463795, -390745, -354220, -317695, -244645, -208120, -171595,
    GREGORIAN,
])  # fmt: skip
"""Days of a Julian count, from 1970: 0001-01-01, the leap days of 100, 200, 300, 500 and so on, and the change."""
_MOVES: Final = np.array([2, 1, 0, -1, -2, -3, -4, -5, -6, -7, -8, -9, -10, 0])
"""Days to the same date in today's calendar, from each of `_BEGINS` on."""

_ZONES: Final = "julian-gregorian-rebase-micros.json"


class Calendar(NamedTuple):
    """The calendar of a file's days and instants, to be converted to today's.

    Attributes:
        mode: Spark's words: CORRECTED (they are), LEGACY, or EXCEPTION: refused where the two differ.
        zone: of the instants of LEGACY.
    """

    mode: str = "CORRECTED"
    zone: str = "UTC"

    @classmethod
    def of_file(cls, metadata: Mapping[bytes, bytes], *, int96: bool, mode: str, zone: str) -> Calendar:
        """Reads from a Parquet file's metadata the calendar that it was written with.

        Args:
            metadata: the file's.
            int96: for timestamps of 96 bits, which have a mark of their own.
            mode: of files that Spark did not write.
            zone: of files that do not name theirs.
        """
        version = metadata.get(b"org.apache.spark.version")
        if version is not None:
            mark = b"org.apache.spark.legacyINT96" if int96 else b"org.apache.spark.legacyDateTime"
            old = version.decode() < ("3.1.0" if int96 else "3.0.0") or mark in metadata
            mode = "LEGACY" if old else "CORRECTED"
        return cls(mode, metadata.get(b"org.apache.spark.timeZone", zone.encode()).decode())

    def days(self, values: pa.Array) -> pa.Array:
        """Dates (``date32``) in today's calendar.

        Raises:
            WrongError: a day that may be of either calendar.
        """
        first = _first(values, pa.int32())
        if self.mode == "CORRECTED" or first is None or first >= GREGORIAN:
            return values
        if self.mode == "EXCEPTION":
            raise WrongError(_EITHER.format("date", "datetimeRebaseMode"), sample=str(pc.min(values).cast(pa.string())))
        return _moved(values, pa.int32(), _BEGINS, _MOVES)

    def instants(self, values: pa.Array) -> pa.Array:
        """Timestamps in microseconds, in today's calendar.

        Raises:
            WrongError: one that may be of either calendar, or of a zone that Spark's table lacks.
        """
        first = _first(values, pa.int64())
        if self.mode == "CORRECTED" or first is None or first >= STANDARD_TIME:
            return values
        sample = str(pc.min(values).cast(pa.timestamp("us")).cast(pa.string()))
        if self.mode == "EXCEPTION":
            raise WrongError(_EITHER.format("timestamp", "datetimeRebaseMode or int96RebaseMode"), sample=sample)
        moves = _moves_of(self.zone)
        if moves is None:
            problem = (
                f"a timestamp before 1900 in the Julian calendar and the zone {self.zone}, which is not in Spark's"
            )
            raise WrongError(f"{problem} {_ZONES}", sample=sample)
        return _moved(values, pa.int64(), *moves)


_EITHER: Final = "a {} of the calendar's change or before, in a file that does not name its calendar: set {}"


def _first(values: pa.Array, kind: pa.DataType) -> Any:
    return pc.min(values).cast(kind).as_py() if len(values) else None


def _moved(values: pa.Array, kind: pa.DataType, begins: Ints, moves: Ints) -> pa.Array:
    numbers = values.cast(kind).fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
    numbers = numbers + moves[np.maximum(np.searchsorted(begins, numbers, side="right") - 1, 0)]
    mask = values.is_null().to_numpy(zero_copy_only=False)
    return pa.array(numbers, pa.int64(), mask=mask).cast(kind).cast(values.type)


@functools.lru_cache(maxsize=64)
def _moves_of(zone: str) -> tuple[Ints, Ints] | None:
    """From which microsecond on instants of a zone move by how many; None for a zone that is not known."""
    if (of_spark := _spark_zones().get(zone)) is not None:
        return of_spark
    try:
        spelled = arrow_zone(zone)
    except pa.ArrowException:
        return None
    if spelled != "UTC" and spelled[0] not in "+-":
        return None
    if zone[0] in "+-":
        spelled = "UTC"  # so Spark has them: Java knows such zones as GMT+08:00 alone
    local = pc.local_timestamp(pa.array([0], pa.timestamp("us", spelled))).cast(pa.int64())
    return _BEGINS * _DAY - local[0].as_py(), _MOVES * _DAY


@functools.lru_cache(maxsize=1)
def _spark_zones() -> dict[str, tuple[Ints, Ints]]:
    """The table, from the Spark that is installed; empty where there is none."""
    package = importlib.util.find_spec("pyspark")
    homes = [os.environ.get("SPARK_HOME"), package and package.origin and Path(package.origin).parent]
    for jar in (jar for home in homes if home for jar in sorted(Path(home, "jars").glob("spark-*.jar"))):
        with zipfile.ZipFile(jar) as files:
            if _ZONES in files.namelist():
                records = json.loads(files.read(_ZONES))
                micros = (1_000_000 * np.array([x["switches"], x["diffs"]]) for x in records)
                return {x["tz"]: (pair[0], pair[1]) for x, pair in zip(records, micros, strict=True)}
    return {}
