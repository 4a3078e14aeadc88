"""Rows of CSV files, read by Arrow, with what it cannot do as Spark does: quotes, escapes and nulls in quotes.

**Quotes.** Arrow lets a quoted value go on behind its end, and takes an escape for one outside quotes, too. Here a
field begins with a quote and ends with one, or it has none that means anything. What stands beside a quote says as a
rule what it does, whatever the quotes before it have begun; so all quotes of a block are judged at once.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pcsv

from gpu_ops.arrays import Array
from gpu_ops.files.columns import Names, WrongError
from gpu_ops.files.text import line_at, refuse_compressed, shown, side_by_side
from gpu_ops.values import as_text

_BLANK_LINES: Final = re.compile(rb"(?:\A|(?<=[\r\n]))[\0-\t\v\f\x0e-\x20]+(?=[\r\n]|\Z)")
_HINT: Final = "a quote within quotes is doubled; for files that Spark wrote say escape='\\'"
_WRONG: Final = 2
"""What a run of quotes leaves that may not be where it is."""


class TextBlock(NamedTuple):
    """A part of a file: whole rows.

    Attributes:
        text: the rows.
        place: bytes of the file before it.
        quoted: whether it has quotes.
        checked: whether these have been judged, as the end of the last row is found by them.
        last: whether the file ends with it.
    """

    text: bytes | memoryview
    place: int
    quoted: bool
    checked: bool
    last: bool


class Quotes:
    """A CSV file in blocks of whole rows, in RFC 4180's spelling.

    Args:
        again: opens the file, whose text is UTF-8.
        block_bytes: read at once; no row is longer.
        sep: between fields.
        quote: around them.
        escape: before a quote or another escape within quotes, empty for none; a quote is doubled then.
        multi_line: whether line breaks may be within quotes.
        drop_blanks: whether lines of nothing but blanks are left out, which only those of one column can mean.
    """

    def __init__(
        self,
        again: Callable[[], pa.NativeFile],
        block_bytes: int,
        sep: str,
        quote: str,
        escape: str,
        *,
        multi_line: bool,
        drop_blanks: bool,
    ) -> None:
        self._again, self._block_bytes = again, block_bytes
        self._quote, self._escape = quote.encode(), escape.encode()
        self._ends = np.isin(np.arange(256), list(f"{sep}\r\n".encode()))
        self._multi_line, self._drop_blanks = multi_line, drop_blanks

    def blocks(self) -> Iterator[TextBlock]:
        """The file's rows, block by block.

        Raises:
            WrongError: a row that is too long, or a quote on which the end of a row depends; names the line.
        """
        stream = self._again()
        size = stream.size() if stream.seekable() else None
        place = 0
        row = b""  # what was read behind the last row that ended
        while True:
            if size is not None:  # read twice, rather than copied with all that comes behind
                stream.seek(place)
                row = b""
            more = stream.read(self._block_bytes - len(row))
            last = not more if size is None else place + len(more) >= size
            text = row + more if row else more
            if not place:
                refuse_compressed(text)
            quoted = self._quote in text
            whole: bytes | memoryview
            if quoted and self._multi_line:
                whole, cut = self._checked(text, place, last=last)
            else:
                cut = len(text) if last else _last_end(text)
                whole = text if cut == len(text) else memoryview(text)[:cut]
            if not cut and len(text) >= self._block_bytes:
                raise WrongError(f"a row is longer than a block of {self._block_bytes} bytes", sample=shown(text))
            if cut:
                yield TextBlock(whole, place, quoted, self._multi_line, last)
            if last:
                return
            place, row = place + cut, text[cut:]

    def rows(self, block: TextBlock, *, exact: bool = True) -> bytes | memoryview:
        """The text of a block, as Arrow reads it as described.

        Args:
            block: the block.
            exact: whether line breaks within values are found, too, if they are not allowed. Else it has to be looked
                at whether there are as many rows as `lines`: that costs a third.

        Raises:
            WrongError: quotes that are not as described; names the line.
        """
        text = block.text
        if block.quoted and not block.checked:
            text, _ = self._checked(text, block.place, last=block.last, exact=exact)
        if not block.place and text[:3] == codecs.BOM_UTF8:
            text = text[3:]
        return _BLANK_LINES.sub(b"", text) if self._drop_blanks and not self._multi_line else text

    def _checked(
        self, block: bytes | memoryview, place: int, *, last: bool, exact: bool = True
    ) -> tuple[bytes | memoryview, int]:
        """The rows that end in a block as Arrow reads them, and how many bytes they had."""
        data = np.frombuffer(block, np.uint8)
        begins, after, marks = self._states(block, data, place, last=last, exact=exact)
        cut = self._cut(block, begins, after) if self._multi_line and not last else len(block)
        if last and len(after) and after[-1]:
            raise self._wrong("a quoted value has no end", block, place, int(begins[-1]))
        if not (len(marks) and len(begins)):
            return memoryview(block)[:cut], cut
        return self._doubled(data[:cut], begins, after, marks[marks < cut]), cut

    def _states(
        self, block: bytes | memoryview, data: Array, place: int, *, last: bool, exact: bool
    ) -> tuple[Array, Array, Array]:
        """The quotes of a block.

        A run of quotes side by side begins or ends a value, or both, or is within one. Most show by what stands beside
        them which it is; a run that turns any state into another counts from the last one that shows it.

        Returns:
            Where runs begin, whether a value goes on behind each, and the places of escapes.
        """
        places = np.flatnonzero(data == self._quote[0])
        marks = np.flatnonzero(data == ord(self._escape)) if self._escape else places[:0]
        if len(marks):
            odd = marks[_nth(marks) % 2 == 0]  # within a run of escapes, those that escape what comes next
            places = places[~np.isin(places - 1, odd)]
        first = len(codecs.BOM_UTF8) if not place and block[:3] == codecs.BOM_UTF8 else 0
        complete = last or not self._multi_line
        if not len(marks) and self._begin_and_end(places, data, first, last=complete):
            if not (exact or self._multi_line or len(places) % 2):
                return places[:0], places[:0], marks  # nothing is wrong, and nothing is to be changed
            begins, after = places, np.arange(len(places)) % 2 == 0
            self._refuse_line_breaks(block, data, place, begins, after)
            return begins, after, marks
        starts = np.flatnonzero(np.diff(places, prepend=-2) != 1)
        begins = places[starts]
        lengths = np.diff(starts, append=len(places))
        stops = begins + lengths
        opens = np.where(begins == first, True, self._ends[data[np.maximum(begins - 1, 0)]])
        closes = np.where(stops == len(data), complete, self._ends[data[np.minimum(stops, len(data) - 1)]])
        odd = lengths % 2 == 1
        once, twice, inner = (lengths == 1, lengths == 2, False) if self._escape else (odd, ~odd, ~odd)
        # in a file as it should be each quote begins a value or ends one, or is one of two within: if that holds
        after = np.bitwise_xor.accumulate(odd)
        before = np.append(False, after[:-1])
        within, outside = inner | (once & closes), np.where(odd, once & opens, ~opens | (twice & closes))
        bad = places[:0]
        if not np.where(before, within, outside).all():
            # what a run leaves behind it: 0 outside of quotes, 1 within them
            outside = np.where(opens, np.where(once, 1, np.where(twice & closes, 0, _WRONG)), 0)
            within = np.where(once & closes, 0, np.where(inner, 1, _WRONG))
            after = _judged(outside, within)
            before = np.append(False, after[:-1])
            goes_on = (not complete) & (stops == len(data))  # in the row that is kept
            bad = np.flatnonzero((np.where(before, within, outside) == _WRONG) & ~goes_on)
        self._refuse_line_breaks(block, data[: begins[bad[0]]] if len(bad) else data, place, begins, after)
        if len(bad):
            problem = "a quote stands within a value or behind its end"
            raise self._wrong(problem if self._escape else f"{problem} ({_HINT})", block, place, int(begins[bad[0]]))
        return begins, after, marks

    def _begin_and_end(self, places: Array, data: Array, first: int, *, last: bool) -> bool:
        """Tells whether all quotes begin or end a value, one after the other, as in nearly all files."""
        opens, closes = places[::2], places[1::2]
        if len(opens) and opens[0] == first:
            opens = opens[1:]
        behind = closes + 1
        if len(behind) and behind[-1] == len(data):
            if not last:
                return False
            behind = behind[:-1]
        return bool(self._ends[data[opens - 1]].all() and self._ends[data[behind]].all())

    def _refuse_line_breaks(
        self, block: bytes | memoryview, data: Array, place: int, begins: Array, after: Array
    ) -> None:
        """Refuses line breaks within values, where there may be none.

        Args:
            block: some rows.
            data: their bytes, up to the first wrong quote.
            place: bytes of the file before them.
            begins: where runs of quotes begin.
            after: whether a value goes on behind each run.

        Raises:
            WrongError: names the line.
        """
        if self._multi_line or not after.any():
            return
        breaks = np.flatnonzero(data <= 13)  # one pass over all bytes, the rest over few
        run = np.searchsorted(begins, breaks[(data[breaks] == 10) | (data[breaks] == 13)]) - 1
        broken = run[(run >= 0) & after[np.maximum(run, 0)]]
        if len(broken):
            before = np.append(False, after[:-1])
            begin = np.flatnonzero(~before[: broken[0] + 1])[-1]
            problem = "a quoted value has a line break, which is for multiLine=true"
            raise self._wrong(problem, block, place, int(begins[begin]))

    def _cut(self, block: bytes | memoryview, begins: Array, after: Array) -> int:
        """Finds the end of the last row that ends in a block."""
        data = np.frombuffer(block, np.uint8)
        ends = np.flatnonzero((data[:-1] == 13) | (data[:-1] == 10))
        if block[-1:] == b"\n":
            ends = np.append(ends, len(block) - 1)
        if len(after):
            run = np.searchsorted(begins, ends) - 1
            ends = ends[(run < 0) | ~after[np.maximum(run, 0)]]
        return int(ends[-1]) + 1 if len(ends) else 0

    def _doubled(self, data: Array, begins: Array, after: Array, marks: Array) -> bytes:
        """A block whose escaped quotes are doubled ones, and whose other escapes within quotes stand for themselves."""
        run = np.searchsorted(begins, marks) - 1
        marks = marks[(run >= 0) & after[np.maximum(run, 0)]]
        nth = _nth(marks)
        made, follows = data.copy(), data[np.minimum(marks + 1, len(data) - 1)]
        made[marks[(nth % 2 == 0) & (follows == self._quote[0])]] = self._quote[0]
        return np.delete(made, marks[nth % 2 == 1]).tobytes()

    def _wrong(self, problem: str, block: bytes | memoryview, place: int, at: int) -> WrongError:
        """An error that shows the line of a place in a block, and its number in the file."""
        text = bytes(block)
        begin = max(text.rfind(b"\n", 0, at), text.rfind(b"\r", 0, at)) + 1
        stream, left, ends = self._again(), place, [text.count(end, 0, at) for end in (b"\n", b"\r")]
        while left:
            part = stream.read(min(left, 1 << 20))
            left -= len(part)
            ends = [count + part.count(end) for count, end in zip(ends, (b"\n", b"\r"), strict=True)]
        return WrongError(f"line {1 + max(ends)}: {problem}", sample=shown(line_at(text, begin)))


def _judged(outside: Array, within: Array) -> Array:
    """Decides whether a value goes on behind each run of quotes, by what each run makes of either state."""
    swaps = (outside == 1) & (within == 0)
    keeps = (outside == 0) & (within == 1)
    fixed = np.where(outside == _WRONG, np.where(within == _WRONG, 0, within), outside)
    turns = np.cumsum(swaps)
    since = np.maximum.accumulate(np.where(swaps | keeps, -1, np.arange(len(turns))))
    base = np.where(since < 0, 0, fixed[np.maximum(since, 0)])
    after: Array = (base + turns - np.where(since < 0, 0, turns[np.maximum(since, 0)])) % 2 == 1
    return after


def _nth(places: Array) -> Array:
    """Counts how many places come directly before each of some places in order."""
    count = np.arange(len(places))
    return count - np.maximum.accumulate(np.where(np.diff(places, prepend=-2) != 1, count, 0)) if len(places) else count


def _last_end(text: bytes) -> int:
    return (text.rfind(b"\n") + 1) or (text.rfind(b"\r", 0, -1) + 1)


class _NamedBlock(NamedTuple):
    """A block, the names of its columns, and how many rows come before it that no other block has."""

    block: TextBlock
    names: list[str]
    skipped: int = 0


_HEAD: Final = rb"[\r\n]*((?:[^%(quote)s\r\n]|%(quote)s[^%(quote)s]*%(quote)s?)*)"
"""The first row, behind empty lines."""


class CsvFile:
    """A CSV file, to be read block by block.

    Args:
        again: opens it.
        schema: of its rows.
        columns: those that are wanted. Of others it is only looked at whether they are as described.
        options: see `gpu_ops.files.formats.FileFormat`.
        block_bytes: read at once; no row is longer.
        finish: gives rows, of which times and dates are text, the types that they have in the end.
        look: is given the names of a header, as `gpu_ops.files.new_columns` takes them.
    """

    def __init__(
        self,
        again: Callable[[], pa.NativeFile],
        schema: pa.Schema,
        columns: Sequence[str],
        options: Mapping[str, str],
        block_bytes: int,
        *,
        finish: Callable[[pa.RecordBatch], pa.RecordBatch],
        look: Callable[[Mapping[str, Any]], None] = lambda _: None,
    ) -> None:
        self._again, self._schema, self._options, self._block_bytes = again, schema, options, block_bytes
        self._columns, self._finish, self._look = columns, finish, look
        self._header = options.get("header") == "true"
        self._quote = options.get("quote", '"')
        self._null = options.get("nullValue")
        self._quotes = self._as_described()

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The columns that are wanted and maybe others.

        Raises:
            ArrowInvalid: an invalid file.
            WrongError: the same, where the line or the column is known.
        """
        rows = 0
        for names, skipped, table in side_by_side(self._rows, self._named()):
            rows += skipped
            if isinstance(table, pa.ArrowInvalid):
                text = re.sub(r"(?<=Row #)\d+", lambda found: str(int(found.group()) + rows), str(table))  # noqa: B023
                numbered = re.search(r"In CSV column #(\d+)", text)
                raise WrongError(text, numbered and names[int(numbered.group(1))]) from table
            rows += sum(batch.num_rows for batch in table)
            yield from table

    def _named(self) -> Iterator[_NamedBlock]:
        """The file's blocks, with the names of their columns."""
        names = None if self._header else list(self._schema.names)
        for block in self._quotes.blocks():
            if names is not None:
                yield _NamedBlock(block, names)
                continue
            text = self._quotes.rows(block)
            head = re.match(_HEAD % {b"quote": re.escape(self._quote.encode())}, text)
            assert head is not None
            if not head.group(1):
                continue
            header = pcsv.read_csv(pa.py_buffer(head.group(1) + b"\n"), parse_options=self._parse())
            names = self._as_declared(header.column_names)
            rest = block._replace(text=memoryview(text)[head.end() :], checked=True, place=max(block.place, 1))
            yield _NamedBlock(rest, names, 1)

    def _rows(self, named: _NamedBlock) -> tuple[list[str], int, list[pa.RecordBatch] | pa.ArrowInvalid]:
        """The names of a block's columns, the rows before it that are not counted, and its rows or what is wrong."""
        block, names, skipped = named
        text = self._quotes.rows(block, exact=False)
        try:
            table = self._read(text, names, quoted=block.quoted)
        except pa.ArrowInvalid as error:
            self._quotes.rows(block)  # a line break within quotes is to be said first
            return names, skipped, [] if "Empty CSV file" in str(error) else error
        if block.quoted and not block.checked and table.num_rows != lines(text):
            self._quotes.rows(block)
        return names, skipped, [self._finish(batch) for batch in table.to_batches()]

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

    def _as_described(self) -> Quotes:
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

    def _as_declared(self, header: list[str]) -> list[str]:
        """The names of a header, those of the schema as it spells them."""
        names = Names(header, case_sensitive=self._options.get("caseSensitive") == "true")
        places = names.places(self._schema.names, required=self._options.get("missingColumns") != "null")
        self._look(dict.fromkeys(header))
        spelled = {place: name for name, place in places.items()}
        return [spelled.get(place, name) for place, name in enumerate(header)]

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


def lines(text: bytes | memoryview) -> int:
    """Counts the lines of a text, empty ones and those that end within quotes included; -1 where it is not plain."""
    data = np.frombuffer(text, np.uint8)
    returns = np.count_nonzero(data == ord("\r"))
    if not data.size or (returns and returns != np.count_nonzero(data[:-1][data[1:] == ord("\n")] == ord("\r"))):
        return -1
    return int(np.count_nonzero(data == ord("\n"))) + int(data[-1] != ord("\n"))


def _is_ascii(block: bytes | memoryview) -> bool:
    return bool(np.frombuffer(block, np.int8).min(initial=0) >= 0)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_binary(kind))
