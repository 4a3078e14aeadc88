"""Row kinds as text and as codes, and sequences as places: the quick ways say what the plain ones do."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from gpu_ops.descriptions.changelog import (
    DEBEZIUM,
    DELTA,
    FLINK,
    SHORT_STRINGS,
    SPELLINGS,
    UNKNOWN,
    WORDS,
    decode_row_kinds,
    encode_row_kinds,
    kinds_as_bytes,
    kinds_as_text,
    places_of,
    readable_changes,
)
from gpu_ops.errors import BadInputError
from gpu_ops.ingest import _counted


def decoded(column: pa.Array | pa.ChunkedArray) -> list[int]:
    told = {"input_name": "orders", "column_name": "op", "has_unique_key": False}
    return decode_row_kinds(column, **told).tolist()


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
@pytest.mark.parametrize("rows", [0, 1, 2, 3, 8, 1001])
def test_row_kinds(rows: int, kind: pa.DataType) -> None:
    codes = np.random.default_rng(rows).integers(0, 4, 2 * rows).astype(np.int8)[::2]  # not side by side
    made = encode_row_kinds(codes)
    made.validate(full=True)
    assert made.to_pylist() == [SHORT_STRINGS[code] for code in codes]
    assert decoded(made.cast(kind)) == codes.tolist()
    assert decoded(made.cast(kind)[1:]) == codes[1:].tolist()
    assert decoded(pa.concat_arrays([pa.array(["insert"], kind), made.cast(kind)])[1:]) == codes.tolist()


@pytest.mark.parametrize("seed", range(30))
def test_bytes_stand_for_texts(seed: int) -> None:
    """Whatever the texts, of whichever encoding, and in whatever slice of an array."""
    rng = np.random.default_rng(seed)
    words = [SPELLINGS, SHORT_STRINGS, ("c", "r", "d", "u"), (*SPELLINGS, "x", "", "+Insert", None)][seed % 4]
    texts = [words[place] for place in rng.integers(0, len(words), int(rng.integers(0, 40)))]
    begin = int(rng.integers(0, 1 + len(texts)))
    column = pa.array(texts, [pa.string(), pa.large_string()][seed % 2])[begin:]
    expected = [SPELLINGS.index(x) if x in SPELLINGS else UNKNOWN for x in texts[begin:]]
    told = {"input_name": "orders", "column_name": "op"}
    places = places_of(column, strict=False, **told)
    assert places.dtype == np.uint8
    assert places.tolist() == expected
    sent = pa.array(places)
    assert places_of(pa.chunked_array([sent]), strict=False, **told).tolist() == expected
    assert kinds_as_text(sent).to_pylist() == [x if x in SPELLINGS else None for x in texts[begin:]]
    rows = pa.record_batch([pa.array(range(len(column)), pa.int64()), column], ["k", "op"])
    assert kinds_as_bytes(rows, "op", input_name="orders", strict=False)["op"].to_pylist() == expected
    for kind in (column, sent):
        if UNKNOWN in expected:
            with pytest.raises(BadInputError, match="unknown row kind"):
                decode_row_kinds(kind, has_unique_key=True, **told)
        else:
            codes = decode_row_kinds(kind, has_unique_key=True, **told)
            assert codes.dtype == np.int8
            assert codes.tolist() == [{**FLINK, **DELTA, **DEBEZIUM}[x] for x in texts[begin:]]
            if "u" in texts[begin:]:
                with pytest.raises(BadInputError, match="needs unique_key="):
                    decode_row_kinds(kind, has_unique_key=False, **told)


def test_changes_that_came_as_bytes() -> None:
    schema = pa.schema([pa.field("row_kind", pa.uint8(), nullable=False), ("n", pa.int64())])
    own = [*SHORT_STRINGS, "bad", "late"]
    rows = pa.record_batch([[WORDS.index(word) for word in own], range(6)], schema=schema)
    assert readable_changes(rows)["row_kind"].to_pylist() == own
    assert readable_changes(rows.slice(1, 3))["row_kind"].to_pylist() == own[1:4]
    assert not readable_changes(rows).schema.field(0).nullable
    assert readable_changes(readable_changes(rows)).equals(readable_changes(rows))


def test_kept_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_ops.descriptions.changelog._KEPT_OFFSETS", 2)
    assert encode_row_kinds(np.full(5, 3, np.int8)).to_pylist() == ["-D"] * 5


@pytest.mark.parametrize(
    "texts", [["+I", "+X"], ["+I", "I+"], ["+", "+I-"], ["+I", ""], ["+I", None], ["+I", "c", "insert"]]
)
def test_other_row_kinds(texts: list[str | None]) -> None:
    if texts[-1] == "insert":
        assert decoded(pa.array(texts)) == [0, 0, 0]
        return
    with pytest.raises(BadInputError, match="unknown row kind"):
        decoded(pa.array(texts, pa.string()))


def test_places_without_a_sort() -> None:
    rng, found = np.random.default_rng(1), 0
    for _ in range(400):
        total = int(rng.integers(0, 30))
        span = total * int(rng.integers(1, 12))
        numbers = rng.choice(span, total, replace=bool(rng.random() < 0.3)) if span else np.empty(0, np.int64)
        numbers += int(rng.integers(-50, 50))
        given = np.split(numbers, np.sort(rng.integers(0, total + 1, 2)))
        places = np.empty(total, np.int64)
        places[np.argsort(numbers, kind="stable")] = np.arange(total)
        counted = _counted(given)
        if counted is not None:
            found += 1
            assert [its.size for its in counted] == [its.size for its in given]
            assert np.concatenate(counted).tolist() == places.tolist()
        else:
            assert np.unique(numbers).size < total or numbers.max() - numbers.min() >= 8 * total
    assert found > 100
    largest = np.iinfo(np.int64)
    assert _counted([np.array([largest.min, largest.max]), np.array([0])]) is None
