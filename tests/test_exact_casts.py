"""Frames as people have them: what loses nothing is taken as it was declared, what would lose something is refused."""

from __future__ import annotations

import datetime as dt
import decimal
import math
import os
import random
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import gpu_ops
from gpu_ops.descriptions.frames import UnfitError, as_table, cast_exactly
from gpu_ops.errors import BadInputError, DescriptionError
from gpu_ops.values import carried

D = decimal.Decimal
OTHER = pa.schema([("k", pa.int64()), ("w", pa.int64())])


def after(declared: Any, frame: Any) -> Any:
    """The type and the values of column ``v`` of a left join whose input was declared by one frame and is another."""
    engine = gpu_ops.engine(a=declared, b=OTHER, on="k", how="left")
    engine.process(a=frame)
    column = engine.table().column("v")
    return column.type, column.to_pylist()


def frame(values: Any, **types: Any) -> pd.DataFrame:
    return pd.DataFrame({"k": range(len(values)), "v": values}, **types)


DAY = dt.datetime(2026, 7, 1, 12)
STAMPS = pd.to_datetime(["2026-07-01 12:00"])
SERIES: dict[str, tuple[Any, Any]] = {
    "object of text": (pd.Series(["x", None], dtype=object), ["x", None]),
    "object of Nones": (pd.Series([None, None], dtype=object), [None, None]),
    "object of NaN and text": (pd.Series([float("nan"), "x"], dtype=object), [None, "x"]),
    "object of decimals": (pd.Series([D("1.10"), None], dtype=object), [D("1.10"), None]),
    "object of dates": (pd.Series([dt.date(2026, 7, 1)]), [dt.date(2026, 7, 1)]),
    "object of times": (pd.Series([dt.time(1, 2)]), [dt.time(1, 2)]),
    "object of bytes": (pd.Series([b"x"]), [b"x"]),
    "object of lists": (pd.Series([[1, 2], None]), [[1, 2], None]),
    "object of dicts": (pd.Series([{"a": 1, "b": "x"}]), [{"a": 1, "b": "x"}]),
    "string": (pd.Series(["x", None], dtype="string"), ["x", None]),
    "string[pyarrow]": (pd.Series(["x", None], dtype="string[pyarrow]"), ["x", None]),
    "category of text": (pd.Series(["x", None, "y"], dtype="category"), ["x", None, "y"]),
    "category of numbers": (pd.Series([3, 1, 3], dtype="category"), [3, 1, 3]),
    "category of nothing": (pd.Series([None], dtype="category"), [None]),
    "bool": (pd.Series([True, False]), [True, False]),
    "boolean": (pd.Series([True, None], dtype="boolean"), [True, None]),
    "int8": (pd.Series([1, 2], dtype="int8"), [1, 2]),
    "uint64": (pd.Series([1, 2**64 - 1], dtype="uint64"), [1, 2**64 - 1]),
    "Int64": (pd.Series([1, None], dtype="Int64"), [1, None]),
    "float32": (pd.Series([1.5, None], dtype="float32"), [1.5, None]),
    "Float64": (pd.Series([1.5, None], dtype="Float64"), [1.5, None]),
    "datetime64[s]": (pd.Series(STAMPS.as_unit("s")), [DAY]),
    "datetime64[ms]": (pd.Series(STAMPS.as_unit("ms")), [DAY]),
    "datetime64[us]": (pd.Series(STAMPS.as_unit("us")), [DAY]),
    "datetime64[ns]": (pd.Series(STAMPS.as_unit("ns")), [DAY]),
    "datetime64[ns, tz]": (pd.Series(STAMPS.tz_localize("Europe/Berlin")), [DAY - dt.timedelta(hours=2)]),
    "timedelta64[ns]": (pd.Series(pd.to_timedelta([1], "s")), [dt.timedelta(seconds=1)]),
    "timedelta64[s]": (pd.Series(pd.to_timedelta([1], "s").as_unit("s")), [dt.timedelta(seconds=1)]),
    "ArrowDtype": (pd.Series([[1]], dtype=pd.ArrowDtype(pa.list_(pa.int8()))), [[1]]),
    "ArrowDtype, decimal": (pd.Series([D("1.5")], dtype=pd.ArrowDtype(pa.decimal128(9, 1))), [D("1.5")]),
}
REFUSED: dict[str, Any] = {
    "Period": pd.Series(pd.period_range("2026-01", periods=2, freq="M")),
    "Interval": pd.Series(pd.interval_range(0, 2)),
    "Sparse": pd.Series([1, 0], dtype="Sparse[int]"),
    "complex": pd.Series([1j]),
    "mixed": pd.Series([1, "x"], dtype=object),
    "objects": pd.Series([object()]),
    "uuid": pd.Series([uuid.uuid4()]),
    "float16": pd.Series([1.5], dtype="float16"),
}


def plain(values: list[Any]) -> list[Any]:
    """Times of pandas' and of zones as those of datetime, instants in UTC."""
    found = [v.to_pydatetime() if isinstance(v, pd.Timestamp) else v for v in values]
    found = [v.to_pytimedelta() if isinstance(v, pd.Timedelta) else v for v in found]
    return [v.astimezone(dt.UTC).replace(tzinfo=None) if isinstance(v, dt.datetime) and v.tzinfo else v for v in found]


@pytest.mark.parametrize("name", SERIES)
def test_dtypes_of_pandas(name: str) -> None:
    """Declared by a frame, the same comes; and a column of Nones, an empty frame and a filtered one do, too."""
    series, values = SERIES[name]
    own = frame(series)
    kind, found = after(own, own)
    assert plain(found) == values
    assert after(own, frame([None] * 2)) == (kind, [None, None])
    assert after(own, pd.DataFrame({"k": [], "v": []})) == (kind, [])
    assert after(own, own[own.k < 0]) == (kind, [])
    twice = pd.concat([own, own], ignore_index=True)
    assert plain(after(own, twice[twice.k == 0].iloc[::-1])[1]) == values[:1] * 2


@pytest.mark.parametrize("name", REFUSED)
def test_dtypes_of_pandas_that_are_no_values(name: str) -> None:
    with pytest.raises(DescriptionError, match="input 'a'"):
        after(frame(REFUSED[name]), None)
    with pytest.raises(BadInputError, match="input 'a'"):
        after(frame(["x"]), frame(REFUSED[name]))


def test_dtypes_of_polars() -> None:
    """Categorical and Enum are text; Object gives Arrow addresses, and is refused."""
    kinds: dict[Any, list[Any]] = {
        pl.String: ["x", None],
        pl.Categorical: ["x", None, "y"],
        pl.Enum(["x", "y", "Object"]): ["y", "Object"],
        pl.Int8: [1, None],
        pl.UInt64: [2**64 - 1],
        pl.Float32: [1.5, None],
        pl.Boolean: [True, None],
        pl.Decimal(10, 2): [D("1.10"), None],
        pl.Date: [dt.date(2026, 7, 1)],
        pl.Time: [dt.time(1, 2)],
        pl.Datetime("ms"): [DAY],
        pl.Duration("us"): [dt.timedelta(seconds=1)],
        pl.Binary: [b"x"],
        pl.List(pl.Categorical): [["x", "y"], None, []],
        pl.Array(pl.Int64, 2): [[1, 2], None],
        pl.Struct({"a": pl.Int64, "b": pl.String}): [{"a": 1, "b": None}],
    }
    for kind, values in kinds.items():
        own = pl.DataFrame({"k": range(len(values)), "v": pl.Series(values, dtype=kind)})
        declared, found = after(own, own)
        assert found == values, kind
        assert after(own, pl.DataFrame({"k": [0], "v": [None]})) == (declared, [None])
        assert after(own, pl.DataFrame({"k": [], "v": []})) == (declared, [])
    objects = pl.DataFrame({"k": [0], "v": pl.Series([object()], dtype=pl.Object)})
    with pytest.raises(DescriptionError, match="'v' holds Python objects"):
        after(objects, None)
    with pytest.raises(BadInputError, match="'v' holds Python objects"):
        after(pa.schema([("k", pa.int64()), ("v", pa.binary(8))]), objects)


def test_row_kinds_in_any_form() -> None:
    rows = pl.DataFrame({"op": ["+I", "-D"], "k": [1, 1], "v": ["x", "x"]})
    source = gpu_ops.Input.of(rows, row_kind="op")
    for kind in (pl.Categorical, pl.Enum(["+I", "-D"]), pl.String):
        assert after(source, rows.with_columns(pl.col("op").cast(kind)))[1] == []
    assert after(source, pd.DataFrame({"op": pd.Series(["+I"], dtype="category"), "k": [1], "v": ["x"]}))[1] == ["x"]
    assert after(source, pd.DataFrame({"op": [], "k": [], "v": []}))[1] == []


def test_an_index_with_a_name_is_a_column_and_one_without_is_none() -> None:
    own = frame(["x", "y", "z"])
    filtered = own[own.v != "y"]
    assert after(own, filtered)[1] == ["x", "z"]
    assert after(own, pa.Table.from_pandas(filtered))[1] == ["x", "z"]
    assert after(filtered, own)[1] == ["x", "y", "z"]
    assert after(own, own.set_index("k"))[1] == after(own.set_index("k"), own)[1] == ["x", "y", "z"]
    assert after(own.rename_axis("id"), own.rename_axis("id"))[1] == ["x", "y", "z"]
    assert gpu_ops.Input.of(own.drop(columns="k").rename_axis("k")).schema.names == ["v", "k"]  # a range
    assert after(own, own.drop(columns="k").rename_axis("k"))[1] == ["x", "y", "z"]
    two = own.set_index(pd.MultiIndex.from_tuples([(1, 2), (3, 4), (5, 6)], names=[None, "b"]))
    assert gpu_ops.Input.of(two).schema.names == ["k", "v", "b"]
    for named in (own.rename_axis("id"), own.rename_axis("id")[lambda f: f.v != "y"]):
        with pytest.raises(BadInputError, match=r"column 'id': is the index of a pandas DataFrame.*reset_index"):
            after(own, named)
    level = pa.schema([("k", pa.int64()), ("v", pa.string()), ("__index_level_0__", pa.int64())])
    assert after(level, own.set_index(pd.Index([5, 9, 2])))[1] == ["x", "y", "z"]  # as somebody has declared it


@pytest.mark.parametrize(
    ("declared", "given", "sample"),
    [
        (frame([D("1.10")]), frame([D("1.1"), D("1.105")]), "1.105"),
        (frame([D("1.10")]), frame([D("1.1"), D("123456789012345678901234567890")]), "123456789012345678901234567890"),
        (frame(STAMPS.as_unit("s")), frame(STAMPS + pd.to_timedelta([0.5], "s")), "12:00:00.500000"),
        (frame(STAMPS.tz_localize("UTC")), frame(STAMPS), "2026"),
        (frame(STAMPS), frame(STAMPS.tz_localize("UTC")), "2026"),
        (frame([[1]]), frame([[1], [1, 2.5]]), r"\[1.0, 2.5\]"),
        (frame([{"a": 1}]), frame([{"a": 1, "b": 2}]), r"\{'a': 1, 'b': 2\}"),
        (frame([{"a": 1, "b": 2}]), frame([{"a": 1}]), r"\{'a': 1\}"),
        (frame(["x"]), frame([None, 1.5]), "1.5"),
        (frame([1]), frame([1.0, 2.0**63]), "9.22"),
        (frame([True]), frame([1]), "1"),
        (frame([1]), frame([True]), "True"),
        (frame(["x"]), frame([b"x"]), "b'x'"),
        (frame([dt.date(2026, 7, 1)]), frame(STAMPS), "2026"),
    ],
)  # fmt: skip
def test_what_would_be_lost_is_refused_with_its_column_and_the_value(declared: Any, given: Any, sample: str) -> None:
    with pytest.raises(BadInputError, match=rf"input 'a', column 'v': .*\(for example .*{sample}"):
        after(declared, given)


# --- random types and values ---------------------------------------------------------------------

NUMBERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
UNITS = ("s", "ms", "us", "ns")
FLAT = [
    *NUMBERS, pa.float32(), pa.float64(), pa.bool_(), pa.string(), pa.large_string(), pa.binary(), pa.large_binary(),
    pa.binary(3), pa.date32(), pa.date64(), pa.time32("s"), pa.time32("ms"), pa.time64("us"), pa.time64("ns"),
    pa.decimal128(5, 2), pa.decimal128(20, 0), pa.decimal128(38, 10), pa.decimal128(3, 3),
    *(pa.duration(unit) for unit in UNITS), *(pa.timestamp(unit) for unit in UNITS),
    *(pa.timestamp(unit, zone) for unit in UNITS for zone in ("UTC", "Europe/Berlin", "+02:00")),
]  # fmt: skip
t = pa.types


def any_type(rng: random.Random, depth: int = 0) -> pa.DataType:
    if depth < 3 and rng.random() < 0.35:
        made: list[Callable[[], pa.DataType]] = [
            lambda: pa.list_(any_type(rng, depth + 1)),
            lambda: pa.large_list(any_type(rng, depth + 1)),
            lambda: pa.list_(any_type(rng, depth + 1), 2),
            lambda: pa.struct([(name, any_type(rng, depth + 1)) for name in "abc"[: rng.randint(1, 3)]]),
            lambda: pa.map_(pa.string(), any_type(rng, depth + 1)),
        ]
        return rng.choice(made)()
    return rng.choice(FLAT)


def any_value(rng: random.Random, kind: pa.DataType) -> Any:
    """A value of a type, near its ends or whole now and then."""
    if rng.random() < 0.15:
        return None
    if t.is_struct(kind):
        return {field.name: any_value(rng, field.type) for field in kind}
    if t.is_map(kind):
        return [(key, any_value(rng, kind.item_type)) for key in "xyz"[: rng.randrange(3)]]
    if t.is_fixed_size_list(kind):
        return [any_value(rng, kind.value_type) for _ in range(2)]
    if t.is_nested(kind):
        return [any_value(rng, kind.value_type) for _ in range(rng.randrange(3))]
    if t.is_boolean(kind):
        return rng.random() < 0.5
    if t.is_integer(kind):
        limits = np.iinfo(kind.to_pandas_dtype())
        return rng.choice((0, 1, 100, int(limits.max), int(limits.min), rng.randint(0, 127)))
    if t.is_floating(kind):
        values = (0.0, -0.0, 1.5, 3.0, math.nan, math.inf, 2.0**24 + 1, 2.0**53, 1e300, 0.1, 2.0**63, -(2.0**63))
        value = rng.choice(values)
        with np.errstate(over="ignore"):
            return float(np.float32(value)) if t.is_float32(kind) else value
    if t.is_decimal(kind):
        digits = rng.choice((0, 1, 10**kind.precision - 1, rng.randrange(10**kind.precision), 10**kind.scale % 1000))
        places = tuple(map(int, str(digits % 10**kind.precision)))
        return D((rng.randrange(2), places, -kind.scale))
    if t.is_fixed_size_binary(kind):
        return rng.choice((b"abc", b"\0\xff\0"))
    if t.is_binary(kind) or t.is_large_binary(kind):
        return rng.choice((b"", b"abc", b"\xff"))
    if t.is_string(kind) or t.is_large_string(kind):
        return rng.choice(("", "x", "é"))
    whole = rng.choice((0, 86_400, -86_400, 1_000_000_000, rng.randrange(10**9)))
    per = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
    if t.is_time(kind):
        return pa.scalar(whole % 86_400 * per[kind.unit] + rng.choice((0, 1)), _integer(kind)).cast(kind)
    if t.is_date(kind):
        return dt.date(1970, 1, 1) + dt.timedelta(days=rng.randrange(-9999, 99_999))
    return pa.scalar(whole * per[kind.unit] + rng.choice((0, 0, 1, 500)), pa.int64()).cast(kind)


def _integer(kind: pa.DataType) -> pa.DataType:
    return pa.int32() if kind.bit_width == 32 else pa.int64()


def same(value: Any, kind: pa.DataType) -> Any:
    """A value by what it says: instants and times as nanoseconds, numbers exactly, fields by name."""
    if isinstance(value, pa.Scalar):
        if not value.is_valid:
            return None
        if t.is_dictionary(kind):
            return same(value.value, kind.value_type)
        if t.is_run_end_encoded(kind):
            return same(value.value, kind.value_type)
        if t.is_struct(kind):
            return {field.name: same(value[field.name], field.type) for field in kind}
        if t.is_map(kind):
            pairs = value.values or ()
            return [(same(p["key"], kind.key_type), same(p["value"], kind.item_type)) for p in pairs]
        if t.is_nested(kind):
            return [same(item, kind.value_type) for item in value.values]
        if t.is_timestamp(kind) or t.is_duration(kind) or t.is_time(kind):
            per = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[kind.unit]
            name = "duration" if t.is_duration(kind) else "time" if t.is_time(kind) else ("at", kind.tz is None)
            return name, value.cast(_integer(kind)).as_py() * per
        value = value.as_py()
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else D(value) if math.isfinite(value) else value
    return ("truth", value) if isinstance(value, bool) else D(value) if isinstance(value, int) else value


def values_of(column: pa.Array | pa.ChunkedArray) -> list[Any]:
    return [same(value, column.type) for value in column]


def otherwise(rng: random.Random, array: pa.Array, depth: int = 0) -> pa.Array:
    """The same values in another type, as another library or other values would have them; nothing is lost."""
    kind = array.type
    if rng.random() < 0.2:
        return array
    if array.null_count == len(array) and rng.random() < 0.5:
        return pa.nulls(len(array))
    if t.is_struct(kind) and len(array):
        names = rng.sample([field.name for field in kind], kind.num_fields)
        parts = dict(zip([field.name for field in kind], array.flatten(), strict=True))
        children = [otherwise(rng, parts[name], depth + 1) for name in names]
        return pa.StructArray.from_arrays(children, names=names, mask=array.is_null())
    if t.is_nested(kind) and not t.is_map(kind) and len(array):
        if t.is_fixed_size_list(kind):
            return array.cast(pa.list_(kind.value_type))
        items, lengths = array.flatten(), pc.list_value_length(array).fill_null(0).to_numpy()
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        items = otherwise(rng, items, depth + 1)
        return pa.ListArray.from_arrays(offsets, items, mask=array.is_null())
    if t.is_nested(kind):
        return array
    choices = [other for other in FLAT if other != kind]
    rng.shuffle(choices)
    for other in choices:
        if (t.is_timestamp(kind) and t.is_timestamp(other) and (kind.tz is None) != (other.tz is None)) or (
            t.is_boolean(kind) != t.is_boolean(other) or t.is_date(kind) != t.is_date(other)
        ):
            continue
        try:
            made = array.cast(other)
            if values_of(made) == values_of(array) and _alike(kind, other):
                array = made
                break
        except pa.ArrowException:
            continue
    form = rng.randrange(4)
    try:
        if form == 1:
            return array.dictionary_encode()
        if form == 2 and depth == 0:
            return pc.run_end_encode(array)
        if form == 3:
            views = {pa.string(): pa.string_view(), pa.binary(): pa.binary_view()}
            return array.cast(views.get(array.type, array.type))
    except pa.ArrowException:
        pass
    return array


def _alike(kind: pa.DataType, other: pa.DataType) -> bool:
    """Whether types are of one kind, so that values of the one are to be taken as the other."""
    kinds: list[Callable[[pa.DataType], bool]] = [
        lambda x: t.is_integer(x) or t.is_floating(x),
        lambda x: t.is_integer(x) or t.is_decimal(x),
        lambda x: t.is_string(x) or t.is_large_string(x),
        lambda x: t.is_binary(x) or t.is_large_binary(x) or t.is_fixed_size_binary(x),
        t.is_timestamp, t.is_time, t.is_duration, t.is_date,
    ]  # fmt: skip
    return any(is_one(kind) and is_one(other) for is_one in kinds)


def any_array(rng: random.Random, kind: pa.DataType) -> pa.Array:
    array = pa.array([any_value(rng, kind) for _ in range(rng.randrange(8))], kind)
    return array.slice(1) if len(array) and rng.random() < 0.3 else array


def check_the_same_in_another_form(number: int) -> None:
    rng = random.Random(f"form-{number}")
    kind = any_type(rng)
    arrays = [any_array(rng, kind) for _ in range(rng.randint(1, 3))]
    for array in arrays:
        found = cast_exactly(pa.chunked_array([otherwise(rng, array)]), kind)
        found.validate(full=True)
        assert found.type == kind
        assert values_of(found) == values_of(array), (number, kind)


def check_any_as_any(number: int) -> None:
    """A column of one type as another: the same values, or refused; which value it is, is said."""
    rng = random.Random(f"any-{number}")
    kind, other = any_type(rng), any_type(rng)
    if rng.random() < 0.5:
        kind = rng.choice(FLAT)
        other = rng.choice([each for each in FLAT if _alike(kind, each)] or FLAT)
    column = pa.chunked_array([any_array(rng, kind), any_array(rng, kind)], kind)
    try:
        found = cast_exactly(column, other)
    except UnfitError as error:
        if error.at is not None:
            with pytest.raises(UnfitError):
                cast_exactly(pa.chunked_array([column.slice(error.at, 1).combine_chunks()]), other)
            cast_exactly(column.slice(0, error.at), other)
        return
    found.validate(full=True)
    assert found.type == other
    assert values_of(found) == values_of(column), (number, kind, other)


def test_the_same_values_in_another_form_are_taken() -> None:
    for number in range(150):
        check_the_same_in_another_form(number)


def test_any_column_as_any_type_is_the_same_or_refused() -> None:
    for number in range(300):
        check_any_as_any(number)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, int(os.environ.get("GPU_JOIN_FRAMES", "20000")), 500))
def test_any_column_and_form(first: int) -> None:
    for number in range(first, first + 500):
        check_any_as_any(number)
        check_the_same_in_another_form(number)


def test_frames_of_pandas_and_polars_hold_what_was_declared() -> None:
    """Rows of random types, out by pandas or polars, in again."""
    for number in range(60):
        rng = random.Random(f"frame-{number}")
        kind = any_type(rng)
        if t.is_date64(kind) or "date64" in str(kind):
            continue
        table = pa.table({"v": any_array(rng, kind)})
        for made in (lambda x: x.to_pandas(types_mapper=pd.ArrowDtype), pl.from_arrow):
            try:
                own = as_table(made(table))
            except (pa.ArrowException, pl.exceptions.PolarsError, pl.exceptions.PanicException, NotImplementedError):
                continue  # it has no such type
            if carried(own.schema.field("v").type) is None:
                continue
            try:
                found = cast_exactly(own["v"], kind)
            except UnfitError:
                assert "map" in str(kind)  # of which polars makes lists of structs
                continue
            assert values_of(found) == values_of(table["v"]), (number, kind)
