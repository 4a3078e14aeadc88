"""Parquet files of two streams for interval joins: times rise file by file, and mix within the delay.

    python -m benchmarks.interval_data DATA [--files 12] [--rows 500000] [--keys 1000000]

Writes ``left/*.parquet`` (lk, lt, lv) and ``right/*.parquet`` (rk, rt, rv), one file of each a micro-batch, and at the
end two files of one row far ahead in time, so that the watermark passes everything.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

START_US = 1_767_225_600_000_000
"""2026-01-01 00:00:00 UTC."""
SECOND = 1_000_000


def write(data: Path, *, files: int = 12, rows: int = 500_000, keys: int = 1_000_000, seconds: int = 10) -> None:
    """Writes both streams as files.

    Args:
        data: a folder.
        files: of each input, those far ahead left out.
        rows: in a file.
        keys: distinct ones, drawn evenly.
        seconds: of event time in a file; single rows are up to 4 s late.
    """
    rng = np.random.default_rng(11)
    for side in ("left", "right"):
        (data / side).mkdir(parents=True, exist_ok=True)
        for number in range(files + 2):
            ahead = number >= files
            size = 1 if ahead else rows
            begin = START_US + (number * seconds + (3600 if ahead else 0)) * SECOND
            even = begin + np.sort(rng.integers(0, 1 if ahead else seconds * SECOND, size))
            times = even - rng.integers(0, 1 if ahead else 4 * SECOND, size)
            s = side[0]
            columns = {
                f"{s}k": np.full(size, -1 if s == "l" else -2) if ahead else rng.integers(0, keys, size),
                f"{s}t": pa.array(times, pa.timestamp("us", "UTC")),
                f"{s}v": rng.integers(0, 1000, size),
            }
            pq.write_table(pa.table(columns), data / side / f"{number:04d}.parquet")


def main() -> None:
    """Writes the streams, from the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("data", type=Path)
    parser.add_argument("--files", type=int, default=12)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--keys", type=int, default=1_000_000)
    options = parser.parse_args()
    write(options.data, files=options.files, rows=options.rows, keys=options.keys)


if __name__ == "__main__":
    main()
