"""Columns of files as columns of a declared schema: names are found, types fit or are refused, values keep theirs.

A file's column is a tree of parts (a struct's fields, a list's items, a map's keys and values), and so is the declared
type. `conversion` walks both once a file, and says how arrays of the one become arrays of the other. Nothing is lost or
guessed at on the way: Arrow's own cast would read a number as text or as true, and a time as its day. Whether a type
fits another is the format's to say (`Leaf`), for parts that have none: all else is the same for all formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from gpu_ops.values import is_bytes


class WrongError(ValueError):
    """A fault of a file, with column and sample where they are known."""

    def __init__(self, problem: str, column: str | None = None, sample: str | None = None) -> None:
        super().__init__(problem)
        self.column, self.sample = column, sample


class ColumnPart(NamedTuple):
    """A column of a file, or what it is made of.

    Attributes:
        name: of a struct's field, or a column.
        type: Arrow's.
        parts: the fields of a struct, the items of a list, the keys and the values of a map.
        about: what the format says besides, of a part that has no others: Parquet's physical type, ORC's type of Spark.
        extension: whether arrays come as those of an extension type, whose storage has the type.
    """

    name: str
    type: pa.DataType
    parts: tuple[ColumnPart, ...] = ()
    about: str = ""
    extension: bool = False


class Conversion(NamedTuple):
    """A conversion of values of a file's type to the declared one.

    Attributes:
        apply: makes an array of another; raises ArrowException or WrongError at a value that has no place.
        total: whether no value can be one that has no place.
        same: whether it changes nothing.
    """

    apply: Callable[[pa.Array], pa.Array]
    total: bool
    same: bool = False


SAME = Conversion(lambda values: values, total=True, same=True)

Leaf = Callable[[ColumnPart, pa.DataType], Conversion | None]
"""What a format makes of a part that has no others; None where its type is not of the declared kind."""


class Names:
    """The names of a file's columns or of a struct's fields, to be found by declared names.

    Args:
        names: of the file.
        case_sensitive: whether names that differ in case are different ones; to Spark they are not, unless
            ``spark.sql.caseSensitive`` is set.
    """

    def __init__(self, names: Iterable[str], *, case_sensitive: bool) -> None:
        self._places: dict[str, list[int]] = {}
        self._names = list(names)
        self._case_sensitive = case_sensitive
        for place, name in enumerate(self._names):
            self._places.setdefault(self._plain(name), []).append(place)

    def places(self, wanted: Iterable[str], path: str = "", *, required: bool) -> dict[str, int | None]:
        """Finds the places of names among those of the file, None for nowhere.

        Args:
            wanted: of columns, or of a struct's fields.
            path: where the struct is within its column, for errors.
            required: whether they have to be there.

        Raises:
            WrongError: one is there more than once, or not at all.
        """
        found: dict[str, int | None] = {}
        for name in wanted:
            places = self._places.get(self._plain(name), [])
            if len(places) == 1 or not (places or required):
                found[name] = places[0] if places else None
                continue
            what, column = (f"its field {f'{path}{name}'.lstrip('.')}", None) if path else ("it", name)
            spelled = ", ".join(repr(self._names[place]) for place in places)
            number = f"there {len(places)} times, as {spelled}" if places else f"not among its columns {self}"
            raise WrongError(f"{what} is {number}", column)
        return found

    def __str__(self) -> str:
        return ", ".join(self._names[:_SHOWN]) + (", ..." if len(self._names) > _SHOWN else "")

    def _plain(self, name: str) -> str:
        return name if self._case_sensitive else name.lower()


_SHOWN = 100
"""Names that an error shows."""


class Rules(NamedTuple):
    """The rules of a format, which hold for all columns of a file.

    Attributes:
        leaf: the format's.
        case_sensitive: see `Names`.
        missing_is_null: whether columns and fields that a file lacks are null, and no error.
    """

    leaf: Leaf
    case_sensitive: bool = False
    missing_is_null: bool = False


def part_of(field: pa.Field, about: Callable[[pa.Field], str] = lambda _: "") -> ColumnPart:
    """The tree of a file's column.

    Args:
        field: the column.
        about: called for each part that has no others, in their order.
    """
    kind, t = field.type, pa.types
    extension = isinstance(kind, pa.BaseExtensionType)
    kind = kind.storage_type if extension else kind
    if t.is_struct(kind):
        within = [kind.field(number) for number in range(kind.num_fields)]
    elif t.is_map(kind):
        within = [kind.key_field, kind.item_field]
    elif t.is_list(kind) or t.is_large_list(kind) or t.is_fixed_size_list(kind):
        within = [kind.value_field]
    else:
        return ColumnPart(field.name, kind, (), about(field), extension)
    return ColumnPart(field.name, kind, tuple(part_of(inner, about) for inner in within), "", extension)


def names_within(part: ColumnPart) -> dict[str, Any] | None:
    """The names of a struct's fields, or of those in a list of structs, and what is within each; None for others."""
    while pa.types.is_list(part.type) or pa.types.is_large_list(part.type):
        (part,) = part.parts
    return {inner.name: names_within(inner) for inner in part.parts} if pa.types.is_struct(part.type) else None


def conversions(
    parts: Sequence[ColumnPart], declared: pa.Schema, rules: Rules
) -> dict[str, tuple[int, Conversion] | None]:
    """Finds the place of each declared column in a file, and its conversion; None for one that is to be null.

    Args:
        parts: the file's columns.
        declared: the schema of what is made of them.
        rules: the format's.

    Raises:
        WrongError: a column that is missing, is there twice, or is of a type that does not fit; names it.
    """
    names = Names((part.name for part in parts), case_sensitive=rules.case_sensitive)
    places = names.places(declared.names, required=not rules.missing_is_null)
    found: dict[str, tuple[int, Conversion] | None] = {}
    for field in declared:
        place = places[field.name]
        try:
            found[field.name] = None if place is None else (place, conversion(parts[place], field.type, rules))
        except WrongError as error:
            raise WrongError(str(error), field.name) from error
    return found


def typed(
    batch: pa.RecordBatch, changes: Mapping[str, Conversion], columns: Sequence[str], declared: pa.Schema
) -> pa.RecordBatch:
    """A batch in its declared types.

    Args:
        batch: of a file; it may have more columns.
        changes: its first columns, by their declared names, in their order.
        columns: those that are given, in this order; null where there is no change for one.
        declared: of a file's rows.

    Raises:
        WrongError: a value that has no place in its column's type; names the column.
    """
    arrays = {}
    for number, (name, change) in enumerate(changes.items()):
        try:
            arrays[name] = change.apply(batch.column(number))
        except (pa.ArrowException, WrongError) as error:
            raise WrongError(str(error), name, getattr(error, "sample", None)) from error
    if not columns:
        return batch.select([])
    fields = [declared.field(name) for name in columns]
    made = [arrays[x.name] if x.name in arrays else pa.nulls(batch.num_rows, x.type) for x in fields]
    return pa.RecordBatch.from_arrays(made, schema=pa.schema(fields))


def conversion(part: ColumnPart, kind: pa.DataType, rules: Rules, path: str = "") -> Conversion:
    """Finds the conversion of a file's column to a declared type.

    Args:
        part: the column, or what is within one.
        kind: the declared type.
        rules: the format's.
        path: where the part is within its column, for errors.

    Raises:
        WrongError: the type does not fit, or a field is missing or there twice.
    """
    t = pa.types
    found: Conversion | None = None
    if t.is_dictionary(part.type):
        coded = conversion(part._replace(type=part.type.value_type), kind, rules, path)
        return Conversion(lambda values: coded.apply(values.dictionary_decode()), coded.total)
    if t.is_null(part.type):
        found = Conversion(lambda values: pa.nulls(len(values), kind), total=True)
    elif t.is_struct(kind) and t.is_struct(part.type):
        found = _struct(part, kind, rules, path)
    elif t.is_map(kind) and t.is_map(part.type):
        found = _map(part, kind, rules, path)
    elif t.is_list(kind) and len(part.parts) == 1:
        found = _list(part, kind, rules, path)
    elif not t.is_nested(kind) and not part.parts:
        found = rules.leaf(part, kind)
    if found is None:
        raise WrongError(f"{path and f'in its field {path[1:]} '}it is {part.type} there, and not {kind}")
    if part.extension:
        return Conversion(lambda values: found.apply(values.storage), found.total)
    return found


def _struct(part: ColumnPart, kind: pa.StructType, rules: Rules, path: str) -> Conversion:
    names = Names((field.name for field in part.parts), case_sensitive=rules.case_sensitive)
    places = names.places((field.name for field in kind), f"{path}.", required=not rules.missing_is_null)
    fields: list[tuple[int, Conversion] | None] = []
    for field in kind:
        place, inner = places[field.name], f"{path}.{field.name}"
        fields.append(None if place is None else (place, conversion(part.parts[place], field.type, rules, inner)))
    same = len(part.parts) == len(fields) and all(
        found is not None and found[0] == number and found[1].same for number, found in enumerate(fields)
    )
    if same and part.type == kind:
        return SAME

    def apply(values: pa.Array) -> pa.Array:
        values = _whole(values)
        children = [
            pa.nulls(len(values), field.type) if found is None else found[1].apply(values.field(found[0]))
            for found, field in zip(fields, kind, strict=True)
        ]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=values.is_null())

    return Conversion(apply, total=all(found is None or found[1].total for found in fields))


def _map(part: ColumnPart, kind: pa.MapType, rules: Rules, path: str) -> Conversion:
    keys = conversion(part.parts[0], kind.key_type, rules, f"{path}.key")
    items = conversion(part.parts[1], kind.item_type, rules, f"{path}.value")
    if keys.same and items.same and part.type == kind:
        return SAME

    def apply(values: pa.Array) -> pa.Array:
        values = _whole(values)
        made = keys.apply(values.keys), items.apply(values.items)
        return pa.MapArray.from_arrays(values.offsets, *made, type=kind, mask=values.is_null())

    return Conversion(apply, total=keys.total and items.total)


def _list(part: ColumnPart, kind: pa.ListType, rules: Rules, path: str) -> Conversion:
    items = conversion(part.parts[0], kind.value_type, rules, f"{path}.item")
    if items.same and part.type == kind:
        return SAME

    def apply(values: pa.Array) -> pa.Array:
        values = _whole(values)
        if not pa.types.is_list(values.type):
            values = values.cast(pa.list_(values.type.value_type))
        return pa.ListArray.from_arrays(values.offsets, items.apply(values.values), type=kind, mask=values.is_null())

    return Conversion(apply, total=items.total)


def _whole(values: pa.Array) -> pa.Array:
    """Copies values so that their parts begin where they do."""
    return values.take(pa.array(np.arange(len(values)))) if values.offset else values


def cast_to(
    kind: pa.DataType, *steps: Callable[[pa.Array], pa.Array], total: bool, before: pa.DataType | None = None
) -> Conversion:
    """A cast of Arrow's, after which come others.

    Args:
        kind: what is made.
        steps: between the first cast and the last.
        total: see `Conversion`.
        before: what the steps take, if it is not the kind.
    """

    def apply(values: pa.Array) -> pa.Array:
        values = values if values.type == (before or kind) else values.cast(before or kind)
        for step in steps:
            values = step(values)
        return values if values.type == kind else values.cast(kind)

    return Conversion(apply, total)


def kind_of(kind: pa.DataType) -> str:
    """The kind of a type in a word: ``integer``, ``text``, ``instant`` and so on; empty for anything else."""
    t = pa.types
    if t.is_timestamp(kind):
        return "local" if kind.tz is None else "instant"
    words = {
        "boolean": t.is_boolean, "integer": t.is_integer, "float": t.is_floating, "decimal": t.is_decimal,
        "date": t.is_date, "time": t.is_time, "duration": t.is_duration, "fixed": t.is_fixed_size_binary,
        "binary": is_bytes,
        "text": lambda x: t.is_string(x) or t.is_large_string(x) or t.is_string_view(x),
    }  # fmt: skip
    return next((word for word, is_one in words.items() if is_one(kind)), "")
