"""What messages say: rows of a declared schema, with their row kinds, and which messages say nothing that can be read.

A message without a value, a tombstone, deletes the row of its key where a key is declared, and says nothing else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.arrays import Ints, Mask
from gpu_ops.errors import DescriptionError
from gpu_ops.messages import avro
from gpu_ops.messages.connect import Group, balanced, groups, is_wrapper, look, rows_of
from gpu_ops.messages.encodings import (
    ENCODINGS,
    PLACEHOLDER,
    Decoding,
    Encodings,
    Look,
    Lost,
    MisfitError,
    decoded,
    encodings_of,
    fits,
    holds,
    text_of,
    unavailable,
    written,
)  # fmt: skip
from gpu_ops.messages.json_texts import bare_floats, objects, read_texts

MessageFormatName = Literal["json", "debezium-json", "avro", "debezium-avro"]
MESSAGE_FORMATS: Final[tuple[str, ...]] = get_args(MessageFormatName)


_BLOCK_BYTES: Final = 8 << 20
"""About as much is read at once."""

_OPS: Final = ("c", "r", "u", "d", "m")
_CREATE, _READ, _UPDATE, _DELETE, _MESSAGE = range(len(_OPS))

_KINDS: Final = ("+I", "-U", "+U", "-D", "u")
_INSERTED, _OLD, _NEW, _DELETED, _UPSERTED = range(len(_KINDS))
"""The last one is an update that names no old row: an input without a unique key refuses it."""

_REFUSED: Final = (ValueError, OverflowError, pa.ArrowTypeError, pa.ArrowNotImplementedError, pa.ArrowCapacityError)
"""What Arrow says of values that are not as they should be; `pa.ArrowInvalid` is a ValueError."""

_WRONG_NUMBER: Final = re.compile(r"Column\((/.*)\) changed from (number to string|string to number)")

_SIDES: Final = ("before", "after")
_WRAPPED: Final = frozenset(("schema", "payload"))


class Bad(NamedTuple):
    """A message that cannot be read: its position, and why."""

    at: int
    problem: str


class MessageRows(NamedTuple):
    """The rows that n messages say, and the messages that cannot be read.

    Attributes:
        rows: in the order of the messages, their row kinds first if there are any.
        at: of each row the position of its message.
        bad: the messages that cannot be read, in their order.
    """

    rows: pa.RecordBatch
    at: Ints
    bad: list[Bad]


class _Parsed(NamedTuple):
    """Rows of some messages; ``sequence`` is twice the number of the message, and one more for what comes second."""

    sequence: Ints
    columns: list[pa.Array]


_Parse: TypeAlias = Callable[[Group, Set[str]], tuple[list[_Parsed], list[Bad]]]
"""What messages say, given the paths of numbers that are texts; it raises where Arrow cannot read all of them."""


@dataclasses.dataclass(frozen=True)
class MessageFormat:
    """The format, schema and options by which messages are read.

    Attributes:
        name: one of `MESSAGE_FORMATS`.
        schema: of the rows.
        required: columns without nulls. The old row of an update or a delete may lack them: sources send of it what
            their log has, often but its key.
        row_kind: the name of the column of row kinds; None without one.
        key: columns that the message's key has: then a value replaces the row of its key, and a tombstone deletes it.
            Not with envelopes.
        encoded: by column one of `gpu_ops.messages.encodings.ENCODINGS`; a schema that comes with a message has
            precedence.
        zone: Arrow's name of that of texts of times that name none.
        registry: the schema registry of messages in Avro.
        avro_schema: theirs, as JSON text, where they have no registry.
        unavailable_value: what Debezium has in place of a large value that did not change.
        unavailable: the name of a column behind the others, with the names of those whose values are not in the
            message; None: such a message cannot be read.

    Raises:
        DescriptionError: no such format or column, or a column that messages do not have.
    """

    name: str
    schema: pa.Schema
    required: tuple[str, ...] = ()
    row_kind: str | None = None
    key: tuple[str, ...] = ()
    encoded: tuple[tuple[str, str], ...] = ()
    zone: str = "UTC"
    registry: avro.SchemaRegistry | None = None
    avro_schema: str | None = None
    unavailable_value: str = PLACEHOLDER
    unavailable: str | None = None

    def __post_init__(self) -> None:
        if self.name not in MESSAGE_FORMATS:
            raise DescriptionError(f"format={self.name!r}; there are {', '.join(MESSAGE_FORMATS)}")
        if not self.schema.names:
            raise DescriptionError("a schema without columns")
        for field in self.schema:
            if self.schema.names.count(field.name) > 1:
                raise DescriptionError(f"column {field.name!r} appears twice")
            if not holds(field.type):
                raise DescriptionError(
                    f"column {field.name!r} is {field.type}; a message of format {self.name} has none"
                )
        there = {name.lower() for name in self.schema.names}
        for what, own in (("the row-kind column ", self.row_kind), ("unavailable=", self.unavailable)):
            if own is not None and own.lower() in there:
                raise DescriptionError(f"{what}{own!r} is among the columns; name another")
            there |= {(own or "").lower()}
        text_of(self.unavailable_value)
        if self.is_avro:
            avro.checked(self.registry, self.avro_schema)
            if self.encoded:
                raise DescriptionError("encoded= is for JSON; Avro's schemas say how values are written")
        elif (self.registry, self.avro_schema) != (None, None):
            raise DescriptionError(f"schema_registry= and avro_schema= are for Avro, not for {self.name}")
        if self.key and self.avro_schema is not None:
            raise DescriptionError("key= with avro_schema= is not built: keys have a schema of their own")
        if self.key and self.is_debezium:
            raise DescriptionError(
                f"key= is for formats json and avro; messages of {self.name} say themselves what is deleted"
            )
        for what, names in (("key", self.key), ("encoded", tuple(name for name, _ in self.encoded))):
            for name in names:
                if name not in self.schema.names:
                    raise DescriptionError(f"{what}= names {name!r}; there are {', '.join(self.schema.names)}")
        for name, encoding in self.encoded:
            if encoding not in ENCODINGS:
                raise DescriptionError(f"encoded= has {encoding!r} for {name!r}; there are {', '.join(ENCODINGS)}")
            kind = self.schema.field(name).type
            if not fits(encoding, kind):
                raise DescriptionError(f"encoded= has {encoding!r} for {name!r}, which is {kind}")

    @property
    def with_kinds(self) -> bool:
        """Tells whether rows have row kinds."""
        return self.is_debezium or bool(self.key)

    @property
    def _placeholder(self) -> str:
        return text_of(self.unavailable_value)

    @property
    def is_debezium(self) -> bool:
        """Tells whether messages are Debezium's envelopes."""
        return self.name.startswith("debezium")

    @property
    def is_avro(self) -> bool:
        """Tells whether messages are in Avro; else they are JSON."""
        return self.name.endswith("avro")

    @property
    def output(self) -> pa.Schema:
        """The schema of the rows, their row kinds first if there are any."""
        kinds = [pa.field(self.row_kind, pa.string())] if self.with_kinds else []
        told = [] if self.unavailable is None else [pa.field(self.unavailable, pa.list_(pa.string()))]
        return pa.schema([*kinds, *self.schema, *told])

    def read(self, values: pa.Array, keys: pa.Array | None = None) -> MessageRows:
        """Reads the rows of n messages.

        Args:
            values: n texts, as bytes.
            keys: n texts; None where they are not needed.
        """
        values = values.cast(pa.binary())
        there = values.is_valid().to_numpy(zero_copy_only=False)
        parsed, bad = list[_Parsed](), list[Bad]()
        read = self._changes if self.is_debezium else self._rows
        for group in self._groups(np.flatnonzero(there), values.filter(pa.array(there)), bad, self.schema.names):
            self._read(group, read, parsed, bad)
        if self.key and keys is not None:
            gone, of_gone = np.flatnonzero(~there), keys.cast(pa.binary()).filter(pa.array(~there))
            named = of_gone.is_valid().to_numpy(zero_copy_only=False)
            bad += [Bad(int(at), "a message with neither key nor value") for at in gone[~named]]
            for group in self._groups(gone[named], of_gone.filter(pa.array(named)), bad, self.key, "its key "):
                self._read(group, self._deletes, parsed, bad)
        return self._in_order(parsed, sorted(bad))

    def names(self, value: bytes) -> Any:
        """The names of the columns that a message's row has, as `gpu_ops.files.new_columns` takes them.

        Args:
            value: the message; it may be one that cannot be read, which has none.
        """
        with contextlib.suppress(ValueError, RecursionError):
            return self._avro_names(value) if self.is_avro else self._json_names(json.loads(value))
        return None

    def _json_names(self, message: Any) -> Any:
        wrapped = isinstance(message, dict) and message.keys() == _WRAPPED
        if wrapped and (self.is_debezium or _WRAPPED.isdisjoint(self.schema.names)):
            message = message["payload"]
        if self.is_debezium and isinstance(message, dict):
            return message.get("after") or message.get("before")
        return message

    def _avro_names(self, value: bytes) -> Any:
        ((_, _, schema),) = avro.groups(pa.array([value]), np.zeros(1, np.int64), self.registry, self.avro_schema)
        rows = [] if isinstance(schema, str) else self._avro_rows(schema)
        return avro.names(schema, rows) if rows and not isinstance(schema, str) else None

    def _groups(
        self, at: Ints, values: pa.BinaryArray, bad: list[Bad], names: Sequence[str], what: str = ""
    ) -> Iterator[Group]:
        """Messages that are read at once; adds to ``bad`` those that are no messages of the format at all."""
        if not at.size:
            return
        wanted = pa.struct([self.schema.field(name) for name in names])
        if self.is_avro:
            for places, some, schema in avro.groups(values, at, self.registry, self.avro_schema):
                found = schema if isinstance(schema, str) else self._of_avro(schema, wanted)
                if isinstance(found, str):
                    bad += [Bad(int(place), f"{what}{found}") for place in places]
                else:
                    yield Group(places, some, found, avro=schema)
            return
        for places, some in _blocks(at, values, bad, what):
            for group in groups(some, places, lambda schema: self._of_connect(schema, wanted)):
                if isinstance(group, Group):
                    yield group
                else:
                    bad += [Bad(int(place), f"{what}{group[1]}") for place in group[0]]

    def _of_avro(self, schema: avro.Schema, wanted: pa.StructType) -> Encodings | str:
        """Finds how values of an Avro schema are written, or why none are read."""
        return self._encodings(self._avro_rows(schema), schema.look, wanted)

    def _avro_rows(self, schema: avro.Schema) -> list[Any]:
        """The parts of a schema that are those of rows."""
        if not self.is_debezium:
            return [schema.message]
        return [one.fields[name] for one in schema.look(schema.message) for name in _SIDES if name in one.fields]

    def _of_connect(self, schema: Any, wanted: pa.StructType) -> Encodings | str | None:
        """Finds the same of a schema of Kafka Connect's; None where a message with such a member is no wrapper."""
        rows = rows_of(schema, envelopes=self.is_debezium)
        if not (self.is_debezium or _WRAPPED.isdisjoint(wanted.names)):
            # these may be columns: then a wrapper is what brings a schema of the columns
            named = [name for row in rows for one in look(row) for name in one.fields]
            if set(wanted.names).isdisjoint(named):
                return None
        if schema is not None and not isinstance(schema, dict):
            return "has members schema and payload, and is no wrapper: its schema is none, or it has one of them twice"
        return self._encodings(rows, look, wanted)

    def _encodings(self, rows: Sequence[Any], look: Look, wanted: pa.StructType) -> Encodings | str:
        try:
            return encodings_of(rows, look, wanted, dict(self.encoded), json=not self.is_avro)
        except MisfitError as error:
            return str(error)

    def _read(
        self, group: Group, parse: _Parse, parsed: list[_Parsed], bad: list[Bad], numbers: Set[str] = frozenset()
    ) -> None:
        """Adds what messages say that are read alike; where they cannot be read together, what their halves say."""
        size = group.at.size
        problem = _add(group, parse, parsed, bad, numbers) if size else None
        if problem is None:
            return
        # Spark and others write NaN and infinities as texts, and Kafka Connect decimals as numbers if it is told to
        number = _WRONG_NUMBER.search(problem)
        if number is not None and number.group(1) not in numbers:
            more = numbers | {number.group(1)}
            if size == 1:
                self._read(group, parse, parsed, bad, more)
                return
            if number.group(2) == "string to number" and _add(group, parse, parsed, bad, more) is None:
                return
        if number is not None and size == 1 and not group.bare:
            self._read(group._replace(bare=True), parse, parsed, bad)
        elif size > 1:
            for part in (group.part(0, size // 2), group.part(size // 2, size)):
                self._read(part, parse, parsed, bad, numbers)
        elif group.whole is not None and not is_wrapper(group.whole[0].as_py()):
            self._read(Group(group.at, group.whole, {}), parse, parsed, bad)
        else:
            bad.append(Bad(int(group.at[0]), problem))

    def _how(self, group: Group) -> Decoding:
        """Decides how values of messages are decoded: as their schema says it, else as it was declared."""
        declared = dict(self.encoded)
        return Decoding(
            lambda place: group.encodings.get(place) or declared.get(place[0], "text"), self.zone, self._placeholder
        )

    def _rows(self, group: Group, numbers: Set[str]) -> tuple[list[_Parsed], list[Bad]]:
        """Reads messages that are rows."""
        how = self._how(group)
        (row,), at = _members(group, {"": self._written(self.schema.names, how, _path(group), numbers)})
        columns, lost = self._columns(row, how)
        lacking = self._lacking(columns, lost)
        bad = [Bad(int(at[place]), problem) for place, problem in lacking.items()]
        if self.key:
            no_row = "has a payload of null; what deletes a row is a message without a value"
            bad += [Bad(int(place), no_row) for place in np.setdiff1d(group.at, at)]
        kinds = np.full(at.size, _UPSERTED) if self.key else None
        return [self._parsed(2 * at, kinds, columns, lost, _without(at.size, lacking))], bad

    def _changes(self, group: Group, numbers: Set[str]) -> tuple[list[_Parsed], list[Bad]]:
        """Reads messages that are Debezium's envelopes."""
        how = self._how(group)
        wanted = {name: self._written(self.schema.names, how, f"{_path(group)}/{name}", numbers) for name in _SIDES}
        (before, after, op), at = _members(group, {**wanted, "op": pa.string()})
        if numbers:  # texts where numbers are expected, which may be none; also in rows that say nothing
            for row in (before, after):
                self._columns(row.filter(row.is_valid()), how)
        code = pc.index_in(op, pa.array(_OPS)).fill_null(-1).to_numpy()
        has_old, has_new = (row.is_valid().to_numpy(zero_copy_only=False) for row in (before, after))
        adds = np.isin(code, (_CREATE, _READ, _UPDATE))
        found = {n: _unknown(op[n].as_py()) for n in np.flatnonzero(code < 0).tolist()}
        for member, wrong in (("before", (code == _DELETE) & ~has_old), ("after", adds & ~has_new)):
            found |= _at(wrong, f"has no row in {member!r}, which its op needs")
        new = np.flatnonzero(adds & has_new)
        columns, lost = self._columns(after.take(pa.array(new)), how)
        lacking = self._lacking(columns, lost)
        found |= {int(new[place]): problem for place, problem in lacking.items()}
        kinds = np.where(code[new] != _UPDATE, _INSERTED, np.where(has_old[new], _NEW, _UPSERTED))
        old = np.flatnonzero(np.isin(code, (_UPDATE, _DELETE)) & has_old)
        gone, gone_lost = self._columns(before.take(pa.array(old)), how)
        if self.unavailable is None:
            found |= {int(old[place]): problem for place, problem in self._unsaid(gone_lost).items()}
        good = _without(at.size, found)
        parsed = [self._parsed(2 * at[new] + 1, kinds, columns, lost, good[new])]
        if old.size:
            kinds = np.where(code[old] == _UPDATE, _OLD, _DELETED)
            parsed.append(self._parsed(2 * at[old], kinds, gone, gone_lost, good[old]))
        return parsed, [Bad(int(at[place]), problem) for place, problem in found.items()]

    def _deletes(self, group: Group, numbers: Set[str]) -> tuple[list[_Parsed], list[Bad]]:
        """Reads messages without a value, by their keys."""
        how = self._how(group)
        (row,), at = _members(group, {"": self._written(self.key, how, _path(group), numbers)})
        columns, lost = self._columns(row, how)
        given = dict(zip(self.key, columns, strict=True))
        null = "deletes a row, and its key has no {!r}, or null: key= names what keys have"
        problems = self._unsaid(lost)
        for name, column in given.items():
            problems |= _at(column.is_null().to_numpy(zero_copy_only=False), null.format(name))
        bad = [Bad(int(at[place]), problem) for place, problem in problems.items()]
        bad += [Bad(int(place), "deletes a row, and its key is null") for place in np.setdiff1d(group.at, at)]
        columns = [given.get(field.name, pa.nulls(at.size, field.type)) for field in self.schema]
        kinds = np.full(at.size, _DELETED)
        return [self._parsed(2 * at, kinds, columns, {}, _without(at.size, problems))], bad

    def _written(self, names: Sequence[str], how: Decoding, path: str, numbers: Set[str]) -> pa.DataType:
        """A row as Arrow reads it from JSON, or as it makes it of what is read from Avro."""
        fields = []
        for name in names:
            kind = self.schema.field(name).type
            there = written(kind, (name,), how.ways, f"{path}/{name}", numbers, json=not self.is_avro)
            if pa.types.is_struct(kind) and self._placeholder not in kind.names:
                there = pa.struct([*there, pa.field(self._placeholder, pa.string())])  # as a map has it
            fields.append(pa.field(name, there))
        return pa.struct(fields)

    def _columns(self, rows: pa.StructArray, how: Decoding) -> tuple[list[pa.Array], dict[str, Lost]]:
        """The columns of rows, none of which is null, in their types; and in which rows some are not there.

        Of such a value null is given.
        """
        made, lost = [], dict[str, Lost]()
        for field, values in zip(rows.type, rows.flatten(), strict=True):
            kind = self.schema.field(field.name).type
            try:
                column = decoded(values, kind, (field.name,), how)
            except _REFUSED as error:
                raise pa.ArrowInvalid(f"column {field.name!r}: {error}") from error
            missing = unavailable(values, column, self._placeholder)
            if missing is not None:
                lost[field.name] = missing
                column = column.take(pa.array(np.arange(len(column)), mask=missing))
            made.append(column)
        return made, lost

    def _unsaid(self, lost: Mapping[str, Lost]) -> dict[int, str]:
        """Rows without a value of theirs, and what is wrong with them."""
        why = (
            f"is not in the message, which has {self._placeholder} for a large value that did not change: set REPLICA "
            "IDENTITY FULL at its source, or read it with unavailable= and give latest() that"
        )
        found: dict[int, str] = {}
        for name, missing in lost.items():
            found |= _at(missing, f"column {name!r} {why}")
        return found

    def _parsed(
        self, sequence: Ints, kinds: Ints | None, columns: list[pa.Array], lost: Mapping[str, Lost], good: Mask
    ) -> _Parsed:
        """Rows with their row kinds if there are any, and the names of columns that are not there if these are wanted.

        Args:
            sequence: of n rows, see `_Parsed`.
            kinds: n codes of `_KINDS`.
            columns: of n values.
            lost: by column, which of its n values are not there.
            good: which of the n rows there are.
        """
        made = [] if kinds is None else [pa.array(_KINDS).take(pa.array(kinds))]
        made += columns
        if self.unavailable is not None:
            missing = np.stack([np.zeros(sequence.size, bool), *lost.values()], axis=1)
            counts = missing.sum(axis=1)
            offsets = pa.array(np.concatenate([[0], np.cumsum(counts)]), pa.int32())
            names = pa.array(["", *lost]).take(pa.array(np.nonzero(missing)[1]))
            made.append(pa.ListArray.from_arrays(offsets, names, mask=pa.array(counts == 0)))
        if not good.all():
            sequence, made = sequence[good], [column.filter(pa.array(good)) for column in made]
        return _Parsed(sequence, made)

    def _lacking(self, columns: Sequence[pa.Array], lost: Mapping[str, Lost]) -> dict[int, str]:
        """Rows that have null where there may be none, and what is wrong with them."""
        found: dict[int, str] = {}
        for name in (*self.required, *self.key):
            column = columns[self.schema.get_field_index(name)]
            nulls = column.is_null().to_numpy(zero_copy_only=False)
            if name in lost and name not in self.key:
                nulls = nulls & ~lost[name]
            found |= _at(nulls, f"column {name!r} is null or missing")
        return found | (self._unsaid(lost) if self.unavailable is None else {})

    def _in_order(self, parsed: Sequence[_Parsed], bad: list[Bad]) -> MessageRows:
        if not parsed:
            return MessageRows(pa.RecordBatch.from_pylist([], schema=self.output), np.zeros(0, np.int64), bad)
        sequence = np.concatenate([part.sequence for part in parsed])
        pieces = zip(*(part.columns for part in parsed), strict=True)
        columns = [piece[0] if len(piece) == 1 else pa.concat_arrays(piece) for piece in pieces]
        rows = pa.RecordBatch.from_arrays(columns, schema=self.output)
        if sequence.size and bool((np.diff(sequence) < 0).any()):
            order = np.argsort(sequence, kind="stable")
            sequence, rows = sequence[order], rows.take(pa.array(order))
        return MessageRows(rows, sequence // 2, bad)


def _add(group: Group, parse: _Parse, parsed: list[_Parsed], bad: list[Bad], numbers: Set[str]) -> str | None:
    """Adds what messages say; or why they cannot be read together."""
    try:
        rows, wrong = parse(group, numbers)
    except _REFUSED as error:
        return str(error)
    parsed += rows
    bad += wrong
    return None


def _blocks(at: Ints, values: pa.BinaryArray, bad: list[Bad], what: str = "") -> Iterator[tuple[Ints, pa.BinaryArray]]:
    """Messages that may be JSON objects, in parts that are read at once; adds the others to ``bad``."""
    if not at.size:
        return
    values, fine = objects(values)
    bad += [Bad(int(place), f"{what}is no JSON object") for place in at[~fine]]
    if not fine.all():
        at, values = at[fine], values.filter(pa.array(fine))
    step = max(1, int(at.size * _BLOCK_BYTES / max(values.nbytes, 1)))
    for start in range(0, at.size, step):
        yield at[start : start + step], values.slice(start, step)


def _members(group: Group, wanted: Mapping[str, pa.DataType]) -> tuple[list[pa.Array], Ints]:
    """Members of messages, or themselves where the name is empty, and their positions; null payloads are left out."""
    fields = list(wanted[""]) if "" in wanted else [pa.field(name, kind) for name, kind in wanted.items()]
    if group.bare:
        kind = pa.struct(fields)
        kind = kind if group.whole is None else pa.struct([("payload", pa.list_(kind))])
        group = group._replace(values=pa.array([bare_floats(group.values[0].as_py(), kind)], pa.binary()))
    if group.avro is not None:
        found = avro.read(group.values, group.avro, pa.struct(fields))
    elif group.whole is not None:
        if not balanced(group.values):
            read_texts(group.whole, pa.schema([pa.field("\0", pa.null())]))
        lists = read_texts(group.values, pa.schema([pa.field("payload", pa.list_(pa.struct(fields)))])).column(0)
        if not pc.all(pc.equal(pc.fill_null(pc.list_value_length(lists), 0), 1)).as_py():
            raise pa.ArrowInvalid("is no JSON object")
        found = lists.flatten()
    else:
        found = read_texts(group.values, pa.schema(fields)).to_struct_array()
    there = found.is_valid()
    found, at = found.filter(there), group.at[there.to_numpy(zero_copy_only=False)]
    return [found] if "" in wanted else found.flatten(), at


def _path(group: Group) -> str:
    return "" if group.whole is None else "/payload/[]"


def _at(mask: Mask, problem: str) -> dict[int, str]:
    """A problem for each place that is true."""
    return dict.fromkeys(np.flatnonzero(mask).tolist(), problem)


def _without(size: int, places: Mapping[int, str]) -> Mask:
    """All of n places but some."""
    good = np.ones(size, bool)
    good[list(places)] = False
    return good


def _unknown(op: str | None) -> str:
    if op == "t":
        return "a truncate (op t) empties its table, which a stream of changes cannot say"
    return "has no op" if op is None else f"has the op {op}, which is none of Debezium's"
