"""A helper for examples and tests of streaming queries: files that arrive one after another."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path


def arrive(folder: str | Path, *rows: Mapping[str, object] | str) -> None:
    """Writes rows into a folder as its next file, which Spark's file source reads in the next micro-batch.

    Args:
        folder: the folder; it is made if it does not exist.
        rows: one line each: mappings as JSON, text (such as CSV) as it is.
    """
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    number = len(list(path.iterdir()))
    (path / f"{number:06d}").write_text("\n".join(lines))
    time.sleep(0.01)  # Spark orders files by their time
