"""Messages that are JSON objects, read all at once, and which of them are none."""

from __future__ import annotations

import json
import re
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.files.formats import read_objects
from gpu_ops.values import Mask, wrong_text

_SUSPECTS: Final = (r"\}[ \t\r\n]*null", r"\x00")
"""What Arrow would end the process at, or take for the end of its text, where it stands between objects."""

_BLANK: Final = " \t\r\n"


def objects(values: pa.BinaryArray) -> tuple[pa.BinaryArray, Mask]:
    """Messages without the blanks around them, and which of them may be JSON objects.

    All others are none. Of those, joined by line breaks, each object lies in one message: a line break is no part of
    a JSON text, so the one between two messages stands behind a ``}`` and before a ``{``, which no object has within.
    As many objects as messages are therefore one in each.

    Args:
        values: n messages, none of them null.
    """
    texts = values.view(pa.string())
    begins = np.ones(len(values), bool) if not len(values) else _shaped(values)
    if not begins.all():
        texts = pc.ascii_trim(texts, _BLANK)
        values = texts.view(pa.binary())
        begins = _shaped(values)
    wrong = wrong_text(pa.chunked_array([texts]))
    if wrong is not None:
        begins &= ~wrong[0]
    data = memoryview(values.buffers()[2] or b"")
    for suspect in _SUSPECTS:
        if re.search(suspect.encode(), data) is not None:
            for at in np.flatnonzero(pc.match_substring_regex(values, suspect).to_numpy(zero_copy_only=False)):
                begins[at] = begins[at] and is_object(values[int(at)].as_py())
    return values, begins


def read(values: pa.BinaryArray, schema: pa.Schema) -> pa.RecordBatch:
    """One row per message.

    Args:
        values: n messages, all of which `objects` has found fit.
        schema: what is read of them, in types that Arrow reads from JSON.

    Raises:
        ArrowException: one of them is none, or does not have such values.
    """
    block = pc.binary_join(pa.ListArray.from_arrays([0, len(values)], values), b"\n")[0].as_buffer()
    table = read_objects(block, schema)
    if table.num_rows != len(values):
        raise pa.ArrowInvalid("more than one JSON object")
    return table.combine_chunks().select(schema.names).to_batches()[0]


def is_object(message: bytes) -> bool:
    """Whether it is one JSON object in UTF-8, by Python's own reader."""
    try:
        return isinstance(json.loads(message.decode()), dict)
    except (ValueError, RecursionError):
        return False


def _shaped(values: pa.BinaryArray) -> npt.NDArray[np.bool_]:
    shaped: Mask = pc.and_(pc.starts_with(values, "{"), pc.ends_with(values, "}")).to_numpy(zero_copy_only=False)
    return shaped.copy()
