"""The errors of the pack. Each names the input, the column and a sample value where there is one."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterable
from typing import Any, Final

_LONG = 200
"""Characters of a sample value; of a document that is a value, the beginning will do."""


class GpuJoinError(Exception):
    """Base class of every error this pack raises on purpose."""


class DescriptionError(GpuJoinError, ValueError):
    """A join or input that cannot be: wrong column, type, option. Raised when it is described."""


class TextError(DescriptionError):
    """A place in a text where it is not what it should be.

    Args:
        message: what is wrong, and what to do instead.
        sql: the text as given.
        line: 1-based line in ``sql``.
        column: 1-based column in that line.
    """

    def __init__(self, message: str, sql: str, line: int, column: int) -> None:
        self.message, self.sql, self.line, self.column = message, sql, line, column
        shown = "".join(sql.splitlines()[line - 1 : line])
        super().__init__(f"{message} (line {line}, column {column})\n{with_caret(shown, column)}")

    def __reduce__(self) -> tuple[type[TextError], tuple[str, str, int, int]]:
        return type(self), (self.message, self.sql, self.line, self.column)


class ConditionError(TextError):
    """A residual condition outside the SQL subset."""


class BadInputError(GpuJoinError, ValueError):
    """A micro-batch that cannot be joined; the state is as it was before it.

    Args:
        input_name: which input.
        column: which column, or None when the whole input is meant.
        problem: what is wrong with it.
        sample: an offending value, shown with ``repr``.
    """

    def __init__(self, input_name: str, column: str | None, problem: str, sample: object = None) -> None:
        self.input_name, self.column, self.problem, self.sample = input_name, column, problem, sample
        # `gpu_ops.sql` calls a column that several tables have by its table, too
        named = None if column is None else column.removeprefix(f"{input_name}__")
        where = f"input '{input_name}'" + (f", column '{named}'" if named is not None else "")
        text = repr(sample)
        shown = f" (for example {text if len(text) <= _LONG else text[:_LONG] + '...'})" if sample is not None else ""
        super().__init__(f"{where}: {problem}{shown}")

    def __reduce__(self) -> tuple[type[BadInputError], tuple[str, str | None, str, str | None]]:
        sample = None if self.sample is None else str(self.sample)
        return type(self), (self.input_name, self.column, self.problem, sample)


class EvaluationError(GpuJoinError, ArithmeticError):
    """A row for which a condition fails in ANSI mode, as it would in Spark; the state is as it was before."""


class BackendError(GpuJoinError, RuntimeError):
    """A backend that was asked for cannot run here; says why."""


class StateError(GpuJoinError, RuntimeError):
    """A state folder that does not fit: another join, query, schema, partition count or version."""


class DatabaseError(GpuJoinError, RuntimeError):
    """A database that cannot be reached, refuses a statement, or does not hold the rows it should.

    Args:
        message: which table, and what the database says.
        state: the database's code of it (SQLSTATE); empty if it gave none.
    """

    def __init__(self, message: str, state: str = "") -> None:
        self.state = state
        super().__init__(message)

    def __reduce__(self) -> tuple[type[DatabaseError], tuple[str, str]]:
        return type(self), (str(self), self.state)


class NotBuiltError(GpuJoinError, NotImplementedError):
    """Something of the contract that this version does not do yet; says what."""


def optional_module(name: str, needed: str) -> Any:
    """Imports a module of a package that is not installed by default.

    Args:
        name: the module's.
        needed: what needs the package, and how it is installed, for the error.

    Raises:
        NotBuiltError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise NotBuiltError(needed) from error


def with_caret(line: str, column: int) -> str:
    """A line of a text, and below it a caret at a 1-based column; tabs stay tabs, so that it is under that."""
    before = "".join("\t" if c == "\t" else " " for c in line[: column - 1].ljust(column - 1))
    return f"  {line}\n  {before}^"


def closest(wanted: str, names: Iterable[str]) -> str:
    """The names, those most like the wanted one first, of dotted ones by their last part, as a message lists them."""
    lowered = {name: name.rpartition(".")[2].lower() for name in names}
    close = difflib.get_close_matches(wanted.rpartition(".")[2].lower(), list(lowered.values()), n=3)
    found = sorted(lowered, key=lambda name: close.index(lowered[name]) if lowered[name] in close else len(close))
    more = len(found) - 12
    return ", ".join(found[:12]) + (f" and {more} more" if more > 0 else "") if found else "none"


_OF_CUDA: Final = re.compile(r"out.of.memory|MemoryAllocation", re.IGNORECASE)
_OF_LIBCUDF: Final = "failure at"


def out_of_memory(error: Exception) -> bool:
    """Tells whether an error says that there was no room, which there may be for less, or later.

    Besides Python's own that is CUDA's, which loads a kernel when it is first launched, and libcudf's of a column that
    would have more than 2^31 - 1 rows or bytes.
    """
    if isinstance(error, OverflowError):
        return _OF_LIBCUDF in str(error)
    of_cuda = isinstance(error, RuntimeError) and not isinstance(error, GpuJoinError)
    return isinstance(error, MemoryError) or (of_cuda and _OF_CUDA.search(str(error)) is not None)
