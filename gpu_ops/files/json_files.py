"""Rows of files of JSON lines, an object each, read by Arrow; texts that are no object are refused, NaN is taken."""

from __future__ import annotations

import codecs
import contextlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.json as pjson

from gpu_ops.files.columns import WrongError
from gpu_ops.files.text import refuse_compressed, shown, side_by_side
from gpu_ops.values import as_text

_BLANK: Final = b" \t\r\n"
_NOT_FINITE: Final = rb'"(NaN|[+-]?INF|[+-]?Infinity)"'


def json_batches(
    stream: pa.NativeFile,
    schema: pa.Schema,
    block_bytes: int,
    finish: Callable[[pa.RecordBatch], pa.RecordBatch],
    look: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> Iterator[pa.RecordBatch]:
    """The objects of a file.

    Args:
        stream: the file.
        schema: the columns.
        block_bytes: read at once.
        finish: gives objects, of which times and dates are text, the types that they have in the end.
        look: is given the last object of each block, for its names (`gpu_ops.files.new_columns`).

    Raises:
        ArrowException, ValueError: a line that is no object, or a value of another type.
    """
    wanted = pa.schema([pa.field(field.name, as_text(field.type)) for field in schema])

    def read(block: bytes) -> list[pa.RecordBatch]:
        return [finish(batch) for batch in _parsed(block, wanted)]

    def looked_at(blocks: Iterator[bytes]) -> Iterator[bytes]:
        for block in blocks:
            with contextlib.suppress(ValueError, RecursionError):  # what is wrong with it is said when it is read
                look(json.loads(block.rstrip(_BLANK).rpartition(b"\n")[2]))
            yield block

    for batches in side_by_side(read, looked_at(_lines(stream, block_bytes))):
        yield from batches


def _lines(stream: pa.NativeFile, block_bytes: int) -> Iterator[bytes]:
    """A text file in blocks of whole lines, be a line as long as it will."""
    begun: list[bytes] = []
    while more := stream.read(block_bytes):
        cut = more.rfind(b"\n") + 1
        begun.append(more[:cut] if cut else more)
        if cut:
            yield b"".join(begun)
            begun = [more[cut:]]
    yield b"".join(begun)


def _parsed(block: bytes, wanted: pa.Schema) -> list[pa.RecordBatch]:
    """The objects of a block of JSON lines.

    Raises:
        ValueError: anything else; names the column.
    """
    block = block.removeprefix(codecs.BOM_UTF8).strip(_BLANK)
    if not block:
        return []
    refuse_compressed(block)
    _check_lines(block)
    if not block.isascii():
        block.decode()  # Arrow takes any bytes for text
    try:
        return _read_lines(block, wanted)
    except pa.ArrowInvalid as error:
        if re.search(_NOT_FINITE, block) is not None:
            return _parsed_floats(block, wanted)
        raise _of_one_line(block, wanted, error) from error


def _check_lines(block: bytes) -> None:
    """Refuses lines that are no object, or begin or end within one.

    A line break between ``}`` and ``{`` is between objects. At a null there some versions of Arrow end the process
    (apache/arrow issue 47409), and behind a null character they read nothing.
    """
    wrong = None if block.startswith(b"{") else re.match(rb".*", block)
    ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
    data = np.frombuffer(block, np.uint8)
    if not ((data[ends - 1] == ord("}")) & (data[ends + 1] == ord("{"))).all():
        wrong = wrong or re.search(rb"(?m)^[ \t\r]*[^{ \t\r\n].*$|^.*[^} \t\r\n][ \t\r]*$", block)
    wrong = wrong or re.search(rb"(?m)^.*\0.*$", block)
    if wrong is not None or not block.endswith(b"}"):
        line = block.rpartition(b"\n")[2] if wrong is None else wrong.group()
        raise WrongError("a line is no object", sample=shown(line))


def _read_lines(block: bytes, wanted: pa.Schema) -> list[pa.RecordBatch]:
    read = read_objects(block, wanted)
    lines = block.count(b"\n") + 1
    if read.num_rows != lines and read.num_rows != sum(map(bool, map(bytes.strip, block.split(b"\n")))):
        raise WrongError(
            "a line has several objects", sample=next(map(shown, re.findall(rb".*\}[ \t\r]*\{.*", block)), None)
        )
    return list(read.to_batches())


def _parsed_floats(block: bytes, wanted: pa.Schema) -> list[pa.RecordBatch]:
    """Objects of which some have NaN or an infinity as text, as Spark writes them.

    Each column that has floats is read from a block of its own, in which the texts of these are none.
    """
    columns = {}
    for field in wanted:
        spelled, names = block, _named_floats(field)
        if names:
            of_one = b"|".join(re.escape(name.encode()) for name in names)
            pattern = rb'((?<!\\)"(?:%s)"\s*:\s*(?:\[[^"{}:]*?)?)%s' % (of_one, _NOT_FINITE)
            while (more := re.sub(pattern, _bare, spelled)) != spelled:  # one of each list at a time
                spelled = more
        try:
            (columns[field.name],) = read_objects(spelled, pa.schema([field])).columns
        except pa.ArrowInvalid as error:
            raise _of_one_line(spelled, pa.schema([field]), error) from error
    return list(pa.table(columns, schema=wanted).combine_chunks().to_batches())


def _bare(text: re.Match[bytes]) -> bytes:
    before, value = text.groups()
    finite = {b"I": b"Infinity", b"-": b"-Infinity", b"N": b"NaN"}
    return bytes(before + finite[value.lstrip(b"+")[:1]])


def _named_floats(field: pa.Field) -> list[str]:
    """The names in a column whose values are floats, or lists of them."""
    kind = field.type
    while pa.types.is_list(kind):
        kind = kind.value_type
    if pa.types.is_struct(kind):
        return [name for part in kind for name in _named_floats(part)]
    return [field.name] if pa.types.is_floating(kind) else []


def _of_one_line(block: bytes, wanted: pa.Schema, error: Exception) -> Exception:
    """An error of a block that names the line or the column."""
    numbered = re.fullmatch(r"(.*) in row (\d+)", str(error), re.DOTALL)
    if numbered is not None:  # of the block, which its reader knows nothing of
        rows = [line for line in block.split(b"\n") if line.strip()]
        return WrongError(numbered.group(1), sample=shown(rows[min(int(numbered.group(2)), len(rows) - 1)]))
    for field in wanted:
        try:
            read_objects(block, pa.schema([field]))
        except pa.ArrowInvalid as of_one:
            return WrongError(str(of_one), field.name)
    return error


def read_objects(block: bytes | pa.Buffer, schema: pa.Schema) -> pa.Table:
    """JSON objects, one behind the other, as Arrow reads them; what the schema does not name is left out.

    Args:
        block: UTF-8, nothing but objects: at a null between them some versions of Arrow end the process.
        schema: of types that Arrow reads from JSON.

    Raises:
        ArrowException: no JSON, or a value of another type.
    """
    return pjson.read_json(
        pa.BufferReader(block),
        pjson.ReadOptions(use_threads=False, block_size=len(block) + 1),
        pjson.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore"),
    )
