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
from collections.abc import Iterator, Mapping, Set
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as f
from sqlglot import exp

from gpu_ops.errors import DescriptionError, closest
from gpu_ops.jobs.settings import SOURCES, Option, value_of
from gpu_ops.jobs.sql_tables import Setting, TableText
from gpu_ops.jobs.sql_text import Text, Word

T = exp.DataType.Type
_BITS: Final = {T.TINYINT: 8, T.SMALLINT: 16, T.INT: 32, T.BIGINT: 64}
_FLOATS: Final = {T.FLOAT: (2 - 2**-23) * 2.0**127, T.DOUBLE: sys.float_info.max}
_NUMBERS: Final = {*_BITS, *_FLOATS, T.DECIMAL}
_TIMES: Final = {T.TIMESTAMP, T.TIMESTAMPLTZ, T.TIMESTAMPTZ, T.TIMESTAMPNTZ}
_TEXTS: Final = {T.TEXT, T.VARCHAR}
_SIZED: Final = {T.TEXT: 100, T.VARCHAR: 100, T.BINARY: 100, T.VARBINARY: 100, T.ARRAY: 3, T.MAP: 3}
"""How long values are where nothing is said, as in Flink."""

_PARTS: Final = {T.ARRAY: ("element",), T.MAP: ("key", "value")}
_ROWS: Final = {T.STRUCT, T.OBJECT}
_SEQUENCES: Final = {*_NUMBERS, *_TEXTS}
_MADE: Final = {*_SIZED, *_NUMBERS, *_TIMES, *_ROWS, T.BOOLEAN, T.DATE}
_OPTIONS: Final[Mapping[str, tuple[Option | None, Set[Any]]]] = {
    "kind": (Option(values=("random", "sequence")), _MADE),
    "null-rate": (Option("rate"), _MADE),
    "min": (None, _NUMBERS),
    "max": (None, _NUMBERS),
    "start": (None, _SEQUENCES),
    "end": (None, _SEQUENCES),
    "length": (Option("length"), set(_SIZED)),
    "var-len": (Option("flag"), {*_SIZED} - {*_PARTS}),
    "values": (Option("list"), _TEXTS),
    "max-past": (Option("duration"), _TIMES),
}
"""Of a column what can be set, and of which types it is; without an `Option` it is a number of the column's type."""

_OF_SEQUENCE: Final = ("kind", "start", "end", "null-rate")
_HUNDRED, _FIRST, _EXACT = 100, 10, 2**53
_NO_END: Final = 10**15
"""So many rows do not come, and Spark counts no more milliseconds, in whose place the number travels."""

_ROW_KIND: Final = "__row_kind"
_DAY_US: Final = 86_400_000_000


@dataclasses.dataclass(frozen=True)
class GeneratedField:
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
    parts: Mapping[str, GeneratedField]
    of_row: bool = False

    @property
    def is_sequence(self) -> bool:
        """True if the values are consecutive numbers."""
        return self.options.get("kind") == "sequence"

    @property
    def first(self) -> int:
        """The first number of a sequence."""
        return int(self.options.get("start", 1))

    @property
    def count(self) -> int | None:
        """The number of values that a sequence has, or None."""
        end = self.options.get("end", _range(self.type)[1] if self.type.this in _BITS else None)
        return None if end is None else int(end) - self.first + 1

    @property
    def limits(self) -> tuple[Any, Any]:
        """Between what its random numbers are; fractions, if nothing is said, from zero on."""
        low, high = _range(self.type)
        return self.options.get("min", low if self.type.this in _BITS else Decimal(0)), self.options.get("max", high)


@dataclasses.dataclass(frozen=True)
class Generated:
    """A table whose rows are generated: its columns, and how many rows of which kind.

    Attributes:
        table: its name.
        fields: its columns.
        rows_per_second: how many come.
        number_of_rows: how many there are, or None for no end.
        seed: other rows with another one.
        start_time: time of the first row; that of the others goes by `rows_per_second`.
        share_of_updates: of a hundred rows, how many are updates.
        share_of_deletes: likewise.
        row_kind: the column of row kinds, or None.
    """

    table: str
    fields: tuple[GeneratedField, ...]
    rows_per_second: int = 10_000
    number_of_rows: int | None = None
    seed: int = 1
    start_time: dt.datetime = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    share_of_updates: int = 0
    share_of_deletes: int = 0
    row_kind: str | None = None

    @property
    def inserts(self) -> int:
        """The number of insertions among a hundred rows."""
        return _HUNDRED - self.share_of_updates - self.share_of_deletes

    @property
    def at_first(self) -> int:
        """The number of insertions before the hundreds begin: enough for their deletes."""
        return self.share_of_deletes + _FIRST

    def ends(self) -> Iterator[int]:
        """After how many rows each sequence has come to its end."""
        for field in self.fields:
            count = field.count if field.is_sequence else None
            if count is not None and field.of_row and count > self.at_first and self.inserts < _HUNDRED:
                # whole hundreds alone: all their insertions are there
                more = (count - self.at_first) // self.inserts * _HUNDRED if self.inserts else _NO_END
                count = self.at_first + more
            if count is not None and count < _NO_END:
                yield count


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
    key, names = {word.text.lower() for word in table.primary_key or ()}, [name.text for name, _ in table.columns]
    row_kind = (values.get("row_kind") or "").lower()
    fields = tuple(
        _field(file, name, exp.DataType.build(kind, dialect="spark"), options, of_row=name.text.lower() in key)
        for name, kind in table.columns
        if name.text.lower() != row_kind
    )
    for path, given in options.items():
        column, _, part = path.partition(".")
        option, setting = next(iter(given.items()))
        problem = f"fields.{path}.{option}: there is no column {column!r}; there are {closest(column, names)}"
        if column in map(str.lower, names):
            problem = f"column {column!r} has no part {part!r}"
        raise file.error(problem, setting.name.at)
    changing = [at[name] for name in ("share_of_deletes", "share_of_updates") if name in values]
    if changing:
        values.setdefault("row_kind", _ROW_KIND)
    if "number_of_rows" not in values and values.get("scan") == "once":
        raise file.error("a table that is read once has an end: set 'number-of-rows'", table.name.at)
    own = {name: values.pop(name) for name in SOURCES["datagen"] if name in values}
    generated = Generated(table.name.text, fields, row_kind=values.get("row_kind"), **own)
    for where in changing[:1]:
        _check_changes(file, where, generated, values)
    ends = [*generated.ends(), *([] if generated.number_of_rows is None else [generated.number_of_rows])]
    return dataclasses.replace(generated, number_of_rows=min(ends, default=None))


def _check_changes(file: Text, at: int, generated: Generated, values: Mapping[str, Any]) -> None:
    key = [field for field in generated.fields if field.of_row]
    if not key:
        raise file.error("updates and deletes are of rows with a key: give the PRIMARY KEY", at)
    if not any(field.is_sequence for field in key):
        problem = f"updates and deletes are of rows that are told apart: set 'fields.{key[0].path}.kind' = 'sequence'"
        raise file.error(problem, at)
    if values.get("updates") == "retract":
        raise file.error("datagen's updates have the new row alone: 'updates' = 'upsert'", at)
    if generated.inserts < generated.share_of_deletes:
        raise file.error("more rows would be deleted than inserted: the shares are too large together", at)


OptionsByColumn = dict[str, dict[str, Setting]]
"""Settings by path and option."""


def _options(file: Text, table: TableText) -> OptionsByColumn:
    options: OptionsByColumn = {}
    for setting in table.settings:
        name = setting.name.text
        if not name.lower().startswith("fields."):
            continue
        path, _, option = name[len("fields.") :].rpartition(".")
        if not path:
            raise file.error(f"{name!r}: an option of a column is written 'fields.{option}.kind'", setting.name.at)
        options.setdefault(path.lower(), {})[option.lower().replace("_", "-")] = setting
    return options


def _field(
    file: Text, name: Word, kind: exp.DataType, options: OptionsByColumn, *, of_row: bool = False
) -> GeneratedField:
    """A column, or a part of one whose name is a path; what is set of it is taken out of the options."""
    path, settings = name.text, options.pop(name.text.lower(), {})
    known = {option: read for option, (read, kinds) in _OPTIONS.items() if kind.this in kinds}
    if not known:
        raise file.error(f"datagen makes no {kind.sql(dialect='spark')}", name.at)
    checked = {}
    for option, setting in settings.items():
        what = f"fields.{path}.{option}"
        if option not in known:
            problem = f"fields.{path} has no option {option!r}; there are {closest(option, known)}"
            raise file.error(problem, setting.name.at)
        text, read = setting.value.text, known[option]
        with file.errors_at(setting.value.at):
            checked[option] = _number(what, text, kind, option) if read is None else value_of(what, read, text)
    named = [(part.name, part.kind) for part in kind.expressions] if kind.this in _ROWS else []
    below = [*named, *zip(_PARTS.get(kind.this, ()), kind.expressions, strict=False)]
    parts = {part: _field(file, Word(f"{path}.{part}", name.at), its, options) for part, its in below}
    field = GeneratedField(path, kind, checked, parts, of_row)
    for option, setting in settings.items():
        why = _misplaced(field, option)
        if why is not None:
            raise file.error(f"fields.{path}{why}", setting.name.at)
    if field.is_sequence:
        (low, high), ends = (field.first, checked.get("end", field.first)), ("start", "end")
    else:
        (low, high), ends = (field.limits if kind.this in _NUMBERS else (0, 0)), ("min", "max")
    if low > high:
        raise file.error(f"fields.{path}: {ends[0]} {low} is above {ends[1]} {high}", settings[min(settings)].name.at)
    return field


def _misplaced(field: GeneratedField, option: str) -> str | None:
    """Why an option does not go together with the others."""
    if option in ("start", "end") and not field.is_sequence:
        return f".{option} is of a sequence: set 'fields.{field.path}.kind'"
    if field.is_sequence and option not in _OF_SEQUENCE:
        return f".{option} is of random values, and this is a sequence"
    if option == "kind" and field.is_sequence and field.type.this not in _SEQUENCES:
        return f": {field.type.sql(dialect='spark')} has no sequence"
    if option == "null-rate" and field.of_row:
        return ": a key is never null"
    if option == "null-rate" and field.path.endswith(".key"):
        return ": a map's key is never null"
    return None


def _number(what: str, text: str, kind: exp.DataType, option: str) -> Any:
    """A number of a type; of a sequence a whole one."""
    try:
        value = Decimal(text.replace("_", ""))
    except InvalidOperation:
        value = Decimal("nan")
    low, high = _range(kind)
    whole = kind.this in _BITS or option in ("start", "end")
    if not value.is_finite():
        raise DescriptionError(f"{what}: {text!r} is no number")
    if whole and value != value.to_integral_value():
        raise DescriptionError(f"{what}: {text!r} is no whole number")
    if low is not None and not low <= value <= high:
        raise DescriptionError(f"{what}: {text} is no {kind.sql(dialect='spark')}")
    return int(value) if whole else value


def _range(kind: exp.DataType) -> tuple[Any, Any]:
    """The least and the largest value of a type of numbers."""
    if kind.this in _BITS:
        half = 2 ** (_BITS[kind.this] - 1)
        return -half, half - 1
    if kind.this not in _NUMBERS:
        return None, None
    most = Decimal(_FLOATS.get(kind.this, 0))
    if kind.this == T.DECIMAL:
        precision, scale, *_ = (*(int(size.name) for size in kind.expressions), 0, 0)
        most = Decimal(f"{10 ** (precision or 10) - 1}E-{scale}")
    return most.copy_negate(), most  # a minus would round it


# What Spark makes of it


def numbers(spark: SparkSession, generated: Generated, *, every_ms: int, once: bool) -> DataFrame:
    """A stream of numbers, from 0 on, in the column ``value``.

    Args:
        spark: a session.
        generated: what is made of them.
        every_ms: how often a micro-batch begins.
        once: all are to come in one, where there is an end.
    """
    end = generated.number_of_rows
    each = end if once and end is not None else max(1, generated.rows_per_second * every_ms // 1000)
    reader = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", each).option("numPartitions", 1)
    # The times that it could give are not used: in their place progress says how many rows there are, 0 for no end.
    return reader.option("startTimestamp", end or 0).option("advanceMillisPerBatch", 0).load()


def rows(counted: DataFrame, generated: Generated) -> DataFrame:
    """The rows of numbers.

    Args:
        counted: numbers in the column ``value``.
        generated: what is made of them.
    """
    number = f.col("value")
    if generated.number_of_rows is not None:
        counted = counted.where(number < generated.number_of_rows)
    if not generated.share_of_updates and not generated.share_of_deletes:
        kind, row = f.lit("+I"), number
    else:
        since = number - generated.at_first
        hundred, rank = f.floor(since / _HUNDRED), f.pmod(since, f.lit(_HUNDRED))
        shift = f.pmod(_hash(generated, "hundred", hundred), f.lit(_HUNDRED))
        rank = f.pmod(rank * 37 + shift, f.lit(_HUNDRED))
        oldest, next_new = (hundred + 1) * generated.share_of_deletes, generated.at_first + hundred * generated.inserts
        updated = oldest + f.floor(_fraction(_hash(generated, "updated", number)) * (next_new - oldest))
        deleted = hundred * generated.share_of_deletes + rank - (_HUNDRED - generated.share_of_deletes)
        is_insert, is_update = rank < generated.inserts, rank < _HUNDRED - generated.share_of_deletes
        kind = f.when((since < 0) | is_insert, "+I").when(is_update, "+U").otherwise("-D")
        row = f.when(since < 0, number).when(is_insert, next_new + rank).when(is_update, updated).otherwise(deleted)
    counted = counted.select(number, row.alias("row"), kind.alias("kind"))
    columns = [
        _column(generated, field, f.col("row") if field.of_row else number).alias(field.path)
        for field in generated.fields
    ]
    if generated.row_kind is not None:
        columns.append(f.col("kind").alias(generated.row_kind))
    return counted.select(*columns)


def _hash(generated: Generated, path: str, number: Column) -> Column:
    text = f"{generated.seed}/{generated.table.lower()}/{path.lower()}".encode()
    salt = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big", signed=True)
    return f.xxhash64(f.lit(salt), number)


def _fraction(hashed: Column) -> Column:
    """From 0 up to, not including, 1."""
    return f.shiftrightunsigned(hashed, 11) / f.lit(float(_EXACT))


def _column(generated: Generated, field: GeneratedField, number: Column, salt: str = "") -> Column:
    kind = field.type.sql(dialect="spark")
    value = number + f.lit(field.first) if field.is_sequence else _random(generated, field, number, salt)
    value = value.cast(kind) if not field.parts else value
    rate = field.options.get("null-rate", 0.0)
    if not rate:
        return value
    return f.when(_fraction(_hash(generated, f"{field.path}{salt}.null", number)) >= rate, value)


def _random(generated: Generated, field: GeneratedField, number: Column, salt: str) -> Column:
    kind, options, path = field.type.this, field.options, field.path + salt
    hashed = _hash(generated, path, number)
    share = _fraction(hashed)
    if kind == T.BOOLEAN:
        return hashed < 0
    if kind in _BITS:
        low, high = field.limits
        return _whole(hashed, share, int(low), int(high), _hash(generated, f"{path}.low", number))
    if kind in _FLOATS:
        low, high = map(float, field.limits)
        return (1 - share) * low + share * high
    if kind == T.DECIMAL:
        return _decimal(field, share)
    if kind in _TIMES or kind == T.DATE:
        return _instant(generated, field, number, share)
    if kind == T.STRUCT:
        return f.struct(*(_column(generated, part, number, salt).alias(name) for name, part in field.parts.items()))
    length = int(options.get("length", _SIZED[kind]))
    if kind in (T.ARRAY, T.MAP):
        made_parts = [
            f.array(*(_column(generated, part, number, f"{salt}.{n}") for n in range(length)))
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
        size = (f.floor(_fraction(_hash(generated, f"{path}.length", number)) * length) + 1).cast("int")
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


def _decimal(field: GeneratedField, share: Column) -> Column:
    kind = field.type.sql(dialect="spark")
    low, high = (Decimal(limit) for limit in field.limits)
    ends = []
    for end in (low, high):  # as a double within the type: what is cast does not overflow
        near = float(end)
        while abs(Decimal(near)) > abs(end):
            near = math.nextafter(near, 0)
        ends.append(near)
    value = ((1 - share) * ends[0] + share * ends[1]).cast(kind)
    return f.least(f.greatest(value, f.lit(str(low)).cast(kind)), f.lit(str(high)).cast(kind))


def _instant(generated: Generated, field: GeneratedField, number: Column, share: Column) -> Column:
    """Time goes by the rows per second, so that it is the same again; as far back as ``max-past``."""
    begun = (generated.start_time - dt.datetime(1970, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1)
    micros = f.floor(number * 1_000_000 / generated.rows_per_second) + f.lit(begun)
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


def _progress(progress: Mapping[str, Any]) -> Iterator[tuple[int, int, int, int]]:
    """Progress of each generated table in a micro-batch: rows in all or 0, first, last, and what Spark counts."""
    for source in progress["sources"]:
        found = re.match(r"RatePerMicroBatchStream\[.*startTimestamp=(\d+)", source["description"])
        if found is not None:
            start, end = (_offset(source[name]) for name in ("startOffset", "endOffset"))
            yield int(found[1]), start, end, int(source["numInputRows"])


def _offset(text: Any) -> int:
    text = json.loads(text) if isinstance(text, str) else text
    return 0 if text is None else int(text["offset"])


def beyond_end(progress: Mapping[str, Any]) -> int:
    """The number of rows that Spark counts in a micro-batch though their tables have ended."""
    return sum(
        counted - counted * (min(last, end) - min(first, end)) // (last - first)
        for end, first, last, counted in _progress(progress)
        if end and last > first
    )


def have_ended(progress: Mapping[str, Any]) -> bool:
    """True if the generated tables among the sources of a micro-batch had all ended before it."""
    found = list(_progress(progress))
    return bool(found) and all(0 < end <= start for end, start, *_ in found)
