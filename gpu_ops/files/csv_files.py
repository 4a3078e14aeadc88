"""Rows of CSV files, read by Arrow, with what it cannot do as Spark does: quotes, escapes and nulls in quotes."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from gpu_ops.files.quotes import Quotes, WrongError
from gpu_ops.files.times import as_text

_HEAD: Final = rb"[\r\n]*((?:[^%(quote)s\r\n]|%(quote)s[^%(quote)s]*%(quote)s?)*)"
"""The first row, behind empty lines."""


class CsvFile:
    """A file.

    Args:
        again: opens it.
        schema: of its rows.
        columns: those that are wanted. Of others it is only looked at whether they are as described.
        options: see `gpu_ops.files.formats.FileFormat`.
        block_bytes: read at once; no row is longer.
    """

    def __init__(
        self,
        again: Callable[[], pa.NativeFile],
        schema: pa.Schema,
        columns: Sequence[str],
        options: Mapping[str, str],
        block_bytes: int,
    ) -> None:
        self._again, self._schema, self._options, self._block_bytes = again, schema, options, block_bytes
        self._columns = columns
        self._header = options.get("header") == "true"
        self._quote = options.get("quote", '"')
        self._null = options.get("nullValue")

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The columns that are wanted and maybe others, times and dates as text.

        Raises:
            ArrowInvalid: an invalid file.
            WrongError: the same, where the line or the column is known.
        """
        names = None if self._header else list(self._schema.names)
        rows = 0
        for block, quoted in self._quotes().blocks():
            if names is None:
                head = re.match(_HEAD % {b"quote": re.escape(self._quote.encode())}, block)
                assert head is not None
                if not head.group(1):
                    continue
                names = pcsv.read_csv(pa.py_buffer(head.group(1) + b"\n"), parse_options=self._parse()).column_names
                self._check_names(names)
                block, rows = memoryview(block)[head.end() :], 1  # noqa: PLW2901
            try:
                table = self._read(block, names, quoted=quoted)
            except pa.ArrowInvalid as error:
                if "Empty CSV file" in str(error):
                    continue
                text = re.sub(r"(?<=Row #)\d+", lambda found: str(int(found.group()) + rows), str(error))  # noqa: B023
                numbered = re.search(r"In CSV column #(\d+)", text)
                raise WrongError(text, numbered and names[int(numbered.group(1))]) from error
            rows += table.num_rows
            yield from table.to_batches()

    def _read(self, block: bytes | memoryview, names: list[str], *, quoted: bool) -> pa.Table:
        """The rows of a block."""
        # whatever is UTF-8 is a text, and whatever is there are bytes
        sure = (pa.string(), pa.binary()) if _is_ascii(block) else (pa.binary(),)
        wanted = [x for x in self._schema if x.name in self._columns or x.type not in sure]
        types = {field.name: as_text(field.type) for field in wanted or self._schema}
        if not quoted:
            return self._read_columns(block, names, types)
        try:
            table = self._read_columns(block, names, types)
        except pa.ArrowInvalid:
            # Where all values are in quotes nulls are, too. Arrow has one rule for all columns, and by that of text
            # these are no nulls; so each kind of columns is read by its own.
            texts = {name: kind for name, kind in types.items() if _is_text(kind)}
            numbers = {name: kind for name, kind in types.items() if name not in texts}
            if not numbers:
                raise
            found = [self._read_columns(block, names, numbers, in_quotes=True)]
            found += [self._read_columns(block, names, texts)] if texts else []
            table = pa.table({name: part[name] for part in found for name in part.column_names})
        return pa.table({name: self._nulls(name, table[name]) for name in types})

    def _read_columns(
        self, block: bytes | memoryview, names: list[str], types: Mapping[str, pa.DataType], *, in_quotes: bool = False
    ) -> pa.Table:
        return pcsv.read_csv(
            pa.py_buffer(block),
            pcsv.ReadOptions(use_threads=False, block_size=len(block) + 1, column_names=names),
            self._parse(),
            pcsv.ConvertOptions(
                check_utf8=not _is_ascii(block),
                column_types=types,
                include_columns=list(types),
                include_missing_columns=self._options.get("missingColumns") == "null",
                null_values=["", self._null or ""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=in_quotes,
            ),
        )

    def _quotes(self) -> Quotes:
        escape = self._options.get("escape", "")
        return Quotes(
            self._decoded,
            self._block_bytes,
            self._options.get("sep", ","),
            self._quote,
            "" if escape == self._quote else escape,  # a quote twice is one in any case
            multi_line=self._options.get("multiLine") == "true",
            drop_blanks=len(self._schema) == 1,
        )

    def _decoded(self) -> pa.NativeFile:
        encoding = codecs.lookup(self._options.get("encoding", "utf8")).name
        stream = self._again()
        return stream if encoding == "utf-8" else pa.transcoding_input_stream(stream, encoding, "utf-8")

    def _parse(self) -> pcsv.ParseOptions:
        return pcsv.ParseOptions(
            delimiter=self._options.get("sep", ","),
            quote_char=self._quote,
            newlines_in_values=self._options.get("multiLine") == "true",
        )

    def _check_names(self, names: list[str]) -> None:
        missing = [name for name in self._schema.names if name not in names]
        if missing and self._options.get("missingColumns") != "null":
            raise WrongError(f"it is not among its columns {', '.join(names)}", missing[0])

    def _nulls(self, name: str, values: pa.ChunkedArray) -> pa.ChunkedArray:
        """Text with the nulls that are in quotes: those that nullValue names, and what is no text and empty."""
        if not _is_text(values.type):
            return values
        of_time = [] if _is_text(self._schema.field(name).type) else [""]
        nulls = [*of_time, *([] if self._null is None else [self._null])]
        if not nulls:
            return values
        is_null = pc.is_in(values, pa.array(nulls).cast(values.type))
        return pc.if_else(is_null, pa.scalar(None, values.type), values)


def _is_ascii(block: bytes | memoryview) -> bool:
    return bool(np.frombuffer(block, np.int8).min(initial=0) >= 0)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))
