"""Row kinds as text and as codes, and sequences as places: the quick ways say what the plain ones do."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from gpu_ops.descriptions.changelog import SHORT_STRINGS, decode_row_kinds, encode_row_kinds
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
