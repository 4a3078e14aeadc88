"""Arrow from outside: damage is refused, text that is no UTF-8 is left to the one who takes it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from gpu_ops.values import check_array


def text(content: bytes, *offsets: int) -> pa.Array:
    buffers = [None, pa.py_buffer(np.array(offsets, np.int32).tobytes()), pa.py_buffer(content)]
    return pa.Array.from_buffers(pa.string(), len(offsets) - 1, buffers)


#: Two texts within something else.
WITHIN: dict[str, Any] = {
    "plain": lambda words: words,
    "large": lambda words: words.cast(pa.binary()).cast(pa.large_binary()).view(pa.large_string()),
    "list": lambda words: pa.ListArray.from_arrays([0, 1, 2], words),
    "fixed_size_list": lambda words: pa.FixedSizeListArray.from_arrays(words, 2),
    "struct": lambda words: pa.StructArray.from_arrays([words, pa.array([1, 2])], ["a", "b"]),
    "map": lambda words: pa.MapArray.from_arrays([0, 1, 2], words, words),
    "dictionary": lambda words: pa.DictionaryArray.from_arrays(pa.array([1, 0]), words),
    "deep": lambda words: pa.ListArray.from_arrays([0, 2], pa.StructArray.from_arrays([words], ["a"])),
    "sliced": lambda words: pa.StructArray.from_arrays([words], ["a"]).slice(1),
}


@pytest.mark.parametrize("within", WITHIN)
def test_text_that_is_no_utf8_is_no_damage(within: str) -> None:
    check_array(WITHIN[within](text(b"good", 0, 2, 4)))
    check_array(WITHIN[within](text(b"\xff\xfe", 0, 1, 2)))


@pytest.mark.parametrize("within", [name for name in WITHIN if name != "large"])
def test_damage_is_found_within_lists_maps_and_structs(within: str) -> None:
    with pytest.raises(pa.ArrowInvalid):
        check_array(WITHIN[within](text(b"good", 0, 1 << 30, 4)))


def test_indices_beyond_a_dictionary_are_damage() -> None:
    indices = pa.array([0, 2], pa.int8())
    for words in (text(b"good", 0, 2, 4), text(b"\xff\xfe", 0, 1, 2)):
        with pytest.raises(pa.ArrowException):
            check_array(pa.DictionaryArray.from_arrays(indices, words, safe=False))


def test_nulls_behind_a_null_struct_and_in_a_map_are_no_damage() -> None:
    """A field that is never null is so behind a null struct, as Spark writes it; a map's values may all be null."""
    kind = pa.struct([pa.field("a", pa.float64()), pa.field("c", pa.string(), nullable=False)])
    rows = pa.array([{"a": 1.0, "c": "x"}], kind).take(pa.array([0, None]))
    assert rows.field(1).null_count == 1
    check_array(rows)
    check_array(pa.array([[("k", None), ("l", None)], [("k", None)]], pa.map_(pa.string(), pa.null())))
