"""Rows of CSV files, read by Arrow, with what it cannot do as Spark does: quotes, escapes and nulls in quotes."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from gpu_ops.files.quotes import Quotes, WrongError
from gpu_ops.files.times import as_text


class CsvFile:
    """A file.

    Args:
        again: opens it.
        schema: of its rows.
        options: see `gpu_ops.files.formats.FileFormat`.
        block_bytes: read at once; no row is longer.
    """

    def __init__(
        self, again: Callable[[], pa.NativeFile], schema: pa.Schema, options: Mapping[str, str], block_bytes: int
    ) -> None:
        self._again, self._schema, self._options, self._block_bytes = again, schema, options, block_bytes
        self._header = options.get("header") == "true"
        self._null = options.get("nullValue")

    def batches(self) -> Iterator[pa.RecordBatch]:
        """All columns, times and dates as text.

        Raises:
            ArrowInvalid: an invalid file.
            WrongError: the same, where the line or the column is known.
        """
        names = self._schema.names
        texts = [name for name in names if _is_text(as_text(self._schema.field(name).type))]
        numbers = [name for name in names if name not in texts]
        # Where all values are in quotes nulls are, too. Arrow has one rule for all columns, and by that of texts these
        # are no nulls: such a file is read again from the row that was reached, once for each kind of columns.
        given, parts = 0, [names]
        while True:
            there = 0
            quotes = [self._open() for _ in parts]
            try:
                readers = [
                    self._reader(x, part, in_quotes=part is numbers) for x, part in zip(quotes, parts, strict=True)
                ]
                for found in zip(*readers, strict=True):
                    columns = {name: batch[name] for batch in found for name in batch.schema.names}
                    rows, skipped = found[0].num_rows, max(0, given - there)
                    there += rows
                    if skipped < rows or not rows:
                        given = max(given, there)
                        arrays = [columns[name] for name in names]
                        if any(x.quoted for x in quotes):
                            arrays = [self._nulls(name, x) for name, x in zip(names, arrays, strict=True)]
                        yield pa.RecordBatch.from_arrays(arrays, names).slice(skipped)
                return
            except pa.ArrowInvalid as error:
                if "Empty CSV file" in str(error):
                    return
                numbered = re.search(r"In CSV column #(\d+)", str(error))
                if numbered is None:
                    raise
                if parts == [names] and numbers:
                    parts = [part for part in (texts, numbers) if part]
                    continue
                raise WrongError(str(error), self._columns()[int(numbered.group(1))]) from error

    def _open(self) -> Quotes:
        escape, quote = self._options.get("escape", ""), self._options.get("quote", '"')
        return Quotes(
            self._decoded,
            self._options.get("sep", ","),
            quote,
            "" if escape == quote else escape,  # a quote twice is one in any case
            multi_line=self._options.get("multiLine") == "true",
            drop_blanks=len(self._schema) == 1,
        )

    def _decoded(self) -> pa.NativeFile:
        encoding = codecs.lookup(self._options.get("encoding", "utf8")).name
        stream = self._again()
        return stream if encoding == "utf-8" else pa.transcoding_input_stream(stream, encoding, "utf-8")

    def _reader(self, quotes: Quotes, columns: Sequence[str], *, in_quotes: bool) -> pcsv.CSVStreamingReader:
        return pcsv.open_csv(
            pa.PythonFile(quotes, mode="r"),
            pcsv.ReadOptions(
                use_threads=False,
                block_size=self._block_bytes,
                column_names=None if self._header else self._schema.names,
            ),
            self._parse(),
            pcsv.ConvertOptions(
                column_types={name: as_text(self._schema.field(name).type) for name in columns},
                include_columns=list(columns),
                include_missing_columns=self._options.get("missingColumns") == "null",
                null_values=["", self._null or ""],
                strings_can_be_null=True,
                quoted_strings_can_be_null=in_quotes,
            ),
        )

    def _parse(self) -> pcsv.ParseOptions:
        return pcsv.ParseOptions(
            delimiter=self._options.get("sep", ","),
            quote_char=self._options.get("quote", '"'),
            newlines_in_values=self._options.get("multiLine") == "true",
        )

    def _columns(self) -> list[str]:
        """Those that the file has."""
        if not self._header:
            return list(self._schema.names)
        return list(pcsv.open_csv(pa.PythonFile(self._open(), mode="r"), parse_options=self._parse()).schema.names)

    def _nulls(self, name: str, values: pa.Array) -> pa.Array:
        """Text with the nulls that are in quotes: those that nullValue names, and what is no text and empty."""
        if not _is_text(values.type):
            return values
        of_time = [] if _is_text(self._schema.field(name).type) else [""]
        nulls = [*of_time, *([] if self._null is None else [self._null])]
        if not nulls:
            return values
        is_null = pc.is_in(values, pa.array(nulls).cast(values.type))
        return pc.if_else(is_null, pa.scalar(None, values.type), values)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))
