"""Rows made from their numbers: Flink's connector ``datagen``, with changes of a table besides.

Law: a row is a function of its number, the table's name and the seed. Spark's ``rate-micro-batch`` counts, and its
offsets are row numbers: a restart goes on at the next one, a repeated micro-batch has the same rows again.

Of a table with shares of updates and deletes every hundred rows have as many as the shares say, at places that differ;
an update is of any row that is there, a delete of the oldest one. Only the first rows are insertions alone.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import hashlib
import json
import math
import re
import sys
from collections.abc import Iterator, Mapping
from decimal import Decimal, InvalidOperation
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import functions as f
from sqlglot import exp

from gpu_ops.descriptions.times import parse_duration
from gpu_ops.errors import DescriptionError
from gpu_ops.jobs.text import TableText, Text
from gpu_ops.query.errors import closest

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

T = exp.DataType.Type
_BITS: Final = {T.TINYINT: 8, T.SMALLINT: 16, T.INT: 32, T.BIGINT: 64}
_FLOATS: Final = {T.FLOAT: (2 - 2**-23) * 2.0**127, T.DOUBLE: sys.float_info.max}
_NUMBERS: Final = {*_BITS, *_FLOATS, T.DECIMAL}
_TIMES: Final = {T.TIMESTAMP, T.TIMESTAMPLTZ, T.TIMESTAMPTZ, T.TIMESTAMPNTZ}
_SIZED: Final = {T.TEXT: 100, T.VARCHAR: 100, T.BINARY: 100, T.VARBINARY: 100, T.ARRAY: 3, T.MAP: 3}
"""How long values are where nothing is said, as in Flink."""

_SEQUENCES: Final = {*_NUMBERS, T.TEXT, T.VARCHAR}
_HUNDRED, _FIRST, _EXACT = 100, 10, 2**53
_NO_END: Final = 10**15
"""So many rows do not come, and Spark counts no more milliseconds, in whose place the number travels."""

_ROW_KIND: Final = "__row_kind"
_START: Final = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
_DAY_US: Final = 86_400_000_000


@dataclasses.dataclass(frozen=True)
class Field:
    """A column, or a part of one.

    Attributes:
        path: its names from the column's on, as options have them.
        type: its type.
        options: what is set, by Flink's names.
        parts: of a row the fields, of an array its element, of a map key and value; by name.
        of_row: whether its values go by the table's row, and not by the change: a part of the key.
    """

    path: str
    type: exp.DataType
    options: Mapping[str, Any]
    parts: Mapping[str, Field]
    of_row: bool = False

    @property
    def is_sequence(self) -> bool:
        """Whether its values are consecutive numbers."""
        return self.options.get("kind") == "sequence"

    @property
    def first(self) -> int:
        """Where a sequence begins."""
        return int(self.options.get("start", 1))

    @property
    def count(self) -> int | None:
        """How many values a sequence has, or None."""
        end = self.options.get("end")
        if end is None and self.type.this in _BITS:
            end = 2 ** (_BITS[self.type.this] - 1) - 1
        return None if end is None else int(end) - self.first + 1


@dataclasses.dataclass(frozen=True)
class Generated:
    """What a table's rows are.

    Attributes:
        table: its name.
        fields: its columns.
        rows_per_second: how many come.
        number_of_rows: how many there are, or None for no end.
        seed: other rows with another one.
        start: time of the first row; that of the others goes by `rows_per_second`.
        updates: of a hundred rows, how many are updates.
        deletes: likewise.
        row_kind: the column of row kinds, or None.
    """

    table: str
    fields: tuple[Field, ...]
    rows_per_second: int = 10_000
    number_of_rows: int | None = None
    seed: int = 1
    start: dt.datetime = _START
    updates: int = 0
    deletes: int = 0
    row_kind: str | None = None

    @property
    def inserts(self) -> int:
        """Of a hundred rows, how many are insertions."""
        return _HUNDRED - self.updates - self.deletes

    @property
    def at_first(self) -> int:
        """How many rows are insertions before the hundreds begin: enough for their deletes."""
        return self.deletes + _FIRST


# What is written down


def read(file: Text, table: TableText, values: dict[str, Any], at: Mapping[str, int]) -> Generated:
    """A table's rows as its options say.

    Args:
        file: the job's text, for errors.
        table: as it is written down.
        values: its settings; those that are this connector's are taken out, and `row_kind` is put in.
        at: where they stand.

    Raises:
        JobError: something in it cannot be; names the position.
    """
    if table.columns is None:
        raise file.error("datagen makes rows of the columns that a table names: name some", table.name.at)
    options = _options(file, table)
    key = {word.text.lower() for word in table.primary_key or ()}
    changing = "share_of_updates" in values or "share_of_deletes" in values
    row_kind = values.get("row_kind")
    columns = [(name, name.text.lower(), exp.DataType.build(kind, dialect="spark")) for name, kind in table.columns]
    fields = tuple(
        _field(file, name.text, kind, options, name.at, of_row=lowered in key)
        for name, lowered, kind in columns
        if row_kind is None or lowered != row_kind.lower()
    )  # fmt: skip
    for path, given in options.items():
        column, _, part = path.partition(".")
        option, (_, where, _) = next(iter(given.items()))
        if any(lowered == column for _, lowered, _ in columns):
            raise file.error(f"column {column!r} has no part {part!r}", where)
        near = closest(column, [name.text for name, *_ in columns])
        raise file.error(f"fields.{path}.{option}: there is no column {column!r}; there are {near}", where)
    shares = [_share(file, values, at, name) for name in ("share_of_updates", "share_of_deletes")]
    if changing:
        where = at.get("share_of_deletes", at.get("share_of_updates", table.name.at))
        _check_changes(file, where, shares, fields, values)
        values.setdefault("row_kind", _ROW_KIND)
    if "number_of_rows" not in values and values.get("scan") == "once":
        raise file.error("a table that is read once has an end: set 'number-of-rows'", table.name.at)
    made = Generated(
        table.name.text,
        fields,
        start=_time(file, values.pop("start_time", None), at),
        updates=shares[0] if changing else 0,
        deletes=shares[1] if changing else 0,
        row_kind=values.get("row_kind"),
        **{name: values.pop(name) for name in ("rows_per_second", "number_of_rows", "seed") if name in values},
    )
    ends = [number for number in (made.number_of_rows, *_ends(made)) if number is not None and number < _NO_END]
    return dataclasses.replace(made, number_of_rows=min(ends, default=None))


def _check_changes(
    file: Text, at: int, shares: list[int], fields: tuple[Field, ...], values: Mapping[str, Any]
) -> None:
    updates, deletes = shares
    if not any(field.of_row for field in fields):
        raise file.error("updates and deletes are of rows with a key: give the PRIMARY KEY", at)
    if not any(field.of_row and field.is_sequence for field in fields):
        key = next(field for field in fields if field.of_row)
        raise file.error(
            f"updates and deletes are of rows that are told apart: set 'fields.{key.path}.kind' = 'sequence'", at
        )
    if values.get("updates") == "retract":
        raise file.error("datagen's updates have the new row alone: 'updates' = 'upsert'", at)
    if updates + deletes > _HUNDRED or deletes > _HUNDRED - updates - deletes:
        raise file.error("more rows would be deleted than inserted: the shares are too large together", at)


def _ends(made: Generated) -> Iterator[int | None]:
    """After how many rows each sequence has come to its end."""
    for field in made.fields:
        count = field.count if field.is_sequence else None
        if count is None or not field.of_row or count <= made.at_first or made.inserts == _HUNDRED:
            yield count
        elif made.inserts:  # whole hundreds alone: all their insertions are there
            yield made.at_first + (count - made.at_first) // made.inserts * _HUNDRED


Given = dict[str, dict[str, tuple[str, int, int]]]
"""By path and option: the value, the positions of the option and of the value."""


def _options(file: Text, table: TableText) -> Given:
    found: Given = {}
    for setting in table.settings:
        name = setting.name.text
        if not name.lower().startswith("fields."):
            continue
        path, _, option = name[len("fields.") :].rpartition(".")
        if not path:
            raise file.error(f"{name!r}: an option of a column is written 'fields.{option}.kind'", setting.name.at)
        found.setdefault(path.lower(), {})[option.lower().replace("_", "-")] = (
            setting.value.text, setting.name.at, setting.value.at,
        )  # fmt: skip
    return found


def _field(file: Text, path: str, kind: exp.DataType, options: Given, at: int, *, of_row: bool = False) -> Field:
    made = kind.this
    given = options.pop(path.lower(), {})
    if made in (T.STRUCT, T.OBJECT):
        below = [(part.name, part.kind) for part in kind.expressions]
    elif made in (T.ARRAY, T.MAP):
        below = list(zip(("element",) if made == T.ARRAY else ("key", "value"), kind.expressions, strict=True))
    elif made in {*_SIZED, *_NUMBERS, *_TIMES, T.BOOLEAN, T.DATE}:
        below = []
    else:
        raise file.error(f"datagen makes no {kind.sql(dialect='spark')}", at)
    names = ["kind", "null-rate"]
    names += ["min", "max"] if made in _NUMBERS else []
    names += ["start", "end"] if made in _SEQUENCES else []
    names += ["length"] if made in _SIZED else []
    names += ["var-len"] if made in _SIZED and not below else []
    names += ["values"] if made in (T.TEXT, T.VARCHAR) else []
    names += ["max-past"] if made in _TIMES else []
    checked = {}
    for option, (text, name_at, value_at) in given.items():
        if option not in names:
            raise file.error(f"fields.{path} has no option {option!r}; there are {closest(option, names)}", name_at)
        try:
            checked[option] = _value(option, text, kind)
        except (DescriptionError, InvalidOperation, ValueError) as error:
            why = str(error) if isinstance(error, DescriptionError) else f"{text!r} is no number"
            raise file.error(f"fields.{path}.{option}: {why}", value_at) from None
    field = Field(
        path, kind, checked, {name: _field(file, f"{path}.{name}", part, options, at) for name, part in below}, of_row
    )
    _check_options(file, field, given)
    return field


def _check_options(file: Text, field: Field, given: Mapping[str, tuple[str, int, int]]) -> None:
    """Refuses options that do not go together."""
    sequence = field.is_sequence
    for option, (_, at, _) in given.items():
        if option in ("start", "end") and not sequence:
            raise file.error(f"fields.{field.path}.{option} is of a sequence: set 'fields.{field.path}.kind'", at)
        if sequence and option not in ("kind", "start", "end", "null-rate"):
            raise file.error(f"fields.{field.path}.{option} is of random values, and this is a sequence", at)
        if option == "kind" and sequence and field.type.this not in _SEQUENCES:
            raise file.error(f"fields.{field.path}: {field.type.sql(dialect='spark')} has no sequence", at)
        if option == "null-rate" and field.of_row:
            raise file.error(f"fields.{field.path}: a key is never null", at)
        if option == "null-rate" and field.path.endswith(".key"):
            raise file.error(f"fields.{field.path}: a map's key is never null", at)
    low, high = ("start", "end") if sequence else ("min", "max")
    if field.type.this in _NUMBERS or sequence:
        first, last = limits(field) if not sequence else (field.first, field.options.get("end", field.first))
        if first > last:
            raise file.error(f"fields.{field.path}: {low} {first} is above {high} {last}", given[min(given)][1])


def _value(option: str, text: str, kind: exp.DataType) -> Any:
    match option:
        case "kind":
            if text not in ("random", "sequence"):
                raise DescriptionError(f"random or sequence, not {text!r}")
            return text
        case "null-rate":
            rate = float(text)
            if not 0 <= rate <= 1:
                raise DescriptionError(f"from 0 to 1, not {text!r}")
            return rate
        case "length":
            if not (text.isascii() and text.isdigit() and 0 < int(text) <= 1_000_000):
                raise DescriptionError(f"a whole number from 1 to 1000000, not {text!r}")
            return int(text)
        case "var-len":
            if text.lower() not in ("true", "false"):
                raise DescriptionError(f"true or false, not {text!r}")
            return text.lower() == "true"
        case "values":
            return tuple(part.strip() for part in text.split(","))
        case "max-past":
            return parse_duration(text)
    value = Decimal(text.replace("_", ""))
    if not value.is_finite():
        raise DescriptionError(f"{text!r} is no number")
    whole = kind.this in _BITS or option in ("start", "end")
    if whole and value != value.to_integral_value():
        raise DescriptionError(f"{text!r} is no whole number")
    low, high = _range(kind)
    if low is not None and not low <= value <= high:
        raise DescriptionError(f"{text} is no {kind.sql(dialect='spark')}")
    return int(value) if whole else value


def _range(kind: exp.DataType) -> tuple[Any, Any]:
    """The least and the largest value of a type of numbers."""
    if kind.this in _BITS:
        half = 2 ** (_BITS[kind.this] - 1)
        return -half, half - 1
    if kind.this in _FLOATS:
        most = Decimal(_FLOATS[kind.this])
        return most.copy_negate(), most
    if kind.this == T.DECIMAL:
        precision, scale = _digits(kind)
        most = Decimal(f"{10**precision - 1}E-{scale}")
        return most.copy_negate(), most  # a minus would round it
    return None, None


def _digits(kind: exp.DataType) -> tuple[int, int]:
    precision, scale = (*(int(size.name) for size in kind.expressions), 0, 0)[:2]
    return precision or 10, scale


def limits(field: Field) -> tuple[Any, Any]:
    """Between what its random numbers are; fractions, if nothing is said, from zero on."""
    low, high = _range(field.type)
    return field.options.get("min", low if field.type.this in _BITS else Decimal(0)), field.options.get("max", high)


def _share(file: Text, values: dict[str, Any], at: Mapping[str, int], name: str) -> int:
    """Of a hundred."""
    text = values.pop(name, "0")
    try:
        share = Decimal(text) * _HUNDRED
    except InvalidOperation:
        share = Decimal(-1)
    if not (share.is_finite() and 0 <= share <= _HUNDRED and share == int(share)):
        raise file.error(f"{name} is a number from 0 to 1 in steps of 0.01, not {text!r}", at[name])
    return int(share)


def _time(file: Text, text: str | None, at: Mapping[str, int]) -> dt.datetime:
    if text is None:
        return _START
    try:
        found = dt.datetime.fromisoformat(text)
    except ValueError:
        raise file.error(f"start_time is a time like '2026-01-31 12:00:00', not {text!r}", at["start_time"]) from None
    return found if found.tzinfo is not None else found.replace(tzinfo=dt.UTC)


# What Spark makes of it


def numbers(spark: SparkSession, made: Generated, *, every_ms: int, once: bool) -> DataFrame:
    """A stream of numbers, from 0 on, in the column ``value``.

    Args:
        spark: a session.
        made: what is made of them.
        every_ms: how often a micro-batch begins.
        once: all are to come in one, where there is an end.
    """
    end = made.number_of_rows
    each = end if once and end is not None else max(1, made.rows_per_second * every_ms // 1000)
    reader = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", each).option("numPartitions", 1)
    # The times that it could give are not used: in their place progress says how many rows there are, 0 for no end.
    return reader.option("startTimestamp", end or 0).option("advanceMillisPerBatch", 0).load()


def rows(counted: DataFrame, made: Generated) -> DataFrame:
    """The rows of numbers.

    Args:
        counted: numbers in the column ``value``.
        made: what is made of them.
    """
    number = f.col("value")
    if made.number_of_rows is not None:
        counted = counted.where(number < made.number_of_rows)
    if not made.updates and not made.deletes:
        kind, row = f.lit("+I"), number
    else:
        since = number - made.at_first
        hundred, rank = f.floor(since / _HUNDRED), f.pmod(since, f.lit(_HUNDRED))
        shift = f.pmod(_hash(made, "hundred", hundred), f.lit(_HUNDRED))
        rank = f.pmod(rank * 37 + shift, f.lit(_HUNDRED))
        oldest, next_new = (hundred + 1) * made.deletes, made.at_first + hundred * made.inserts
        updated = oldest + f.floor(_fraction(_hash(made, "updated", number)) * (next_new - oldest))
        deleted = hundred * made.deletes + rank - (_HUNDRED - made.deletes)
        is_insert, is_update = rank < made.inserts, rank < _HUNDRED - made.deletes
        kind = f.when((since < 0) | is_insert, "+I").when(is_update, "+U").otherwise("-D")
        row = f.when(since < 0, number).when(is_insert, next_new + rank).when(is_update, updated).otherwise(deleted)
    counted = counted.select(number, row.alias("row"), kind.alias("kind"))
    columns = [
        _column(made, field, f.col("row") if field.of_row else number).alias(field.path) for field in made.fields
    ]
    if made.row_kind is not None:
        columns.append(f.col("kind").alias(made.row_kind))
    return counted.select(*columns)


def _hash(made: Generated, path: str, number: Column) -> Column:
    text = f"{made.seed}/{made.table.lower()}/{path.lower()}".encode()
    salt = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)
    return f.xxhash64(f.lit(salt), number)


def _fraction(hashed: Column) -> Column:
    """From 0 up to, not including, 1."""
    return f.shiftrightunsigned(hashed, 11) / f.lit(float(_EXACT))


def _column(made: Generated, field: Field, number: Column, salt: str = "") -> Column:
    kind = field.type.sql(dialect="spark")
    value = _sequence(field, number) if field.is_sequence else _random(made, field, number, salt)
    value = value.cast(kind) if not field.parts else value
    rate = field.options.get("null-rate", 0.0)
    if not rate:
        return value
    return f.when(_fraction(_hash(made, f"{field.path}{salt}.null", number)) >= rate, value)


def _sequence(field: Field, number: Column) -> Column:
    return number + f.lit(field.first)


def _random(made: Generated, field: Field, number: Column, salt: str) -> Column:
    kind, options, path = field.type.this, field.options, field.path + salt
    hashed = _hash(made, path, number)
    share = _fraction(hashed)
    if kind == T.BOOLEAN:
        return hashed < 0
    if kind in _BITS:
        low, high = limits(field)
        return _whole(hashed, share, int(low), int(high), _hash(made, f"{path}.low", number))
    if kind in _FLOATS:
        low, high = map(float, limits(field))
        return (1 - share) * low + share * high
    if kind == T.DECIMAL:
        return _decimal(field, share)
    if kind in _TIMES or kind == T.DATE:
        return _instant(made, field, number, share)
    if kind == T.STRUCT:
        return f.struct(*(_column(made, part, number, salt).alias(name) for name, part in field.parts.items()))
    length = int(options.get("length", _SIZED[kind]))
    if kind in (T.ARRAY, T.MAP):
        made_parts = [
            f.array(*(_column(made, part, number, f"{salt}.{n}") for n in range(length)))
            for part in field.parts.values()
        ]
        if kind == T.ARRAY:
            return made_parts[0]
        keys = f.array_distinct(made_parts[0])
        return f.map_from_arrays(keys, f.slice(made_parts[1], f.lit(1), f.size(keys)))
    if "values" in options:
        chosen = f.array(*map(f.lit, options["values"]))
        return f.element_at(chosen, (f.floor(share * len(options["values"])) + 1).cast("int"))
    size: Column = f.lit(length)
    if options.get("var-len"):
        size = (f.floor(_fraction(_hash(made, f"{path}.length", number)) * length) + 1).cast("int")
    of_text = kind in (T.TEXT, T.VARCHAR)
    digits = size if of_text else size * 2
    blocks = f.sequence(f.lit(1), f.lit(math.ceil(length / (16 if of_text else 8))))
    text = f.array_join(f.transform(blocks, lambda n: f.lpad(f.hex(f.xxhash64(hashed, n)), 16, "0")), "")
    text = f.lower(text.substr(f.lit(1), digits))
    return text if of_text else f.unhex(text)


def _whole(hashed: Column, share: Column, low: int, high: int, finer: Column) -> Column:
    """Whole numbers, both ends included."""
    many = high - low + 1
    if many == 2**64:
        return hashed
    if many <= _EXACT:
        return f.floor(share * float(many)) + f.lit(low)
    # a fraction has 53 bits: what is below them is another hash's
    coarse = f.least(share * float(many) + float(low), f.lit(float(2**63 - 4096))).cast("bigint")
    return f.least(f.greatest(coarse + f.pmod(finer, f.lit(many >> 53)), f.lit(low)), f.lit(high))


def _decimal(field: Field, share: Column) -> Column:
    kind = field.type.sql(dialect="spark")
    low, high = (Decimal(limit) for limit in limits(field))
    ends = []
    for end in (low, high):  # as a double within the type: what is cast does not overflow
        near = float(end)
        while abs(Decimal(near)) > abs(end):
            near = math.nextafter(near, 0)
        ends.append(near)
    value = ((1 - share) * ends[0] + share * ends[1]).cast(kind)
    return f.least(f.greatest(value, f.lit(str(low)).cast(kind)), f.lit(str(high)).cast(kind))


def _instant(made: Generated, field: Field, number: Column, share: Column) -> Column:
    """Time goes by the rows per second, so that it is the same again; as far back as ``max-past``."""
    begun = (made.start - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)
    micros = f.floor(number * 1_000_000 / made.rows_per_second) + f.lit(begun)
    past = field.options.get("max-past")
    if past is not None:
        micros = micros - f.floor(share * float(past * 1000 + 1))
    if field.type.this == T.DATE:
        return f.date_from_unix_date(f.floor(micros / _DAY_US).cast("int"))
    if field.type.this == T.TIMESTAMPNTZ:
        return f.expr("TIMESTAMP_NTZ '1970-01-01 00:00:00'") + f.make_dt_interval(
            secs=(micros.cast("decimal(19, 0)") * f.lit(Decimal("0.000001"))).cast("decimal(18, 6)")
        )
    return f.timestamp_micros(micros)


# What has come of it


def _progress(progress: Mapping[str, Any]) -> Iterator[tuple[int, int, int, int] | None]:
    """Of each source: how many rows it has, or 0; where a micro-batch of them begins and ends; how many are counted."""
    for source in progress["sources"]:
        found = re.match(r"RatePerMicroBatchStream\[.*startTimestamp=(\d+)", source["description"])
        if found is None:
            yield None
        else:
            start, end = (_offset(source[name]) for name in ("startOffset", "endOffset"))
            yield int(found[1]), start, end, int(source["numInputRows"])


def _offset(found: Any) -> int:
    found = json.loads(found) if isinstance(found, str) else found
    return 0 if found is None else int(found["offset"])


def beyond_end(progress: Mapping[str, Any]) -> int:
    """Of the rows that Spark counts in a micro-batch, how many are none, as their tables have ended."""
    more = 0
    for found in _progress(progress):
        if found is not None and found[0] and found[2] > found[1]:
            end, first, last, counted = found
            more += counted - counted * (min(last, end) - min(first, end)) // (last - first)
    return more


def have_ended(progress: Mapping[str, Any]) -> bool:
    """Whether the generated tables among the sources of a micro-batch had all ended before it."""
    found = [one for one in _progress(progress) if one is not None]
    return bool(found) and all(0 < end <= start for end, start, *_ in found)
