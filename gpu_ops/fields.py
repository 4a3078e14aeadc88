"""The fields of what a user writes down have their declared types: checked before anything is made of it."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pyarrow as pa

from gpu_ops.errors import DescriptionError, GpuJoinError

_SURROGATE: Final = re.compile("[\ud800-\udfff]")
"""What text has that cannot be written as UTF-8."""

MAX_MS: Final = 1 << 60
"""Durations, milliseconds, are smaller than this: added to a time they fit in int64."""


def check_fields(described: Any, prefix: str = "") -> None:
    """Refuses a value of another type than its field's; a list becomes the tuple that it stands for.

    Args:
        described: a dataclass; a field of a Literal type takes any text here, its own check names what there is.
        prefix: of the message.

    Raises:
        DescriptionError: names the field and shows the value.
    """
    hints = typing.get_type_hints(type(described))
    for name in (field.name for field in dataclasses.fields(described)):
        value, hint = getattr(described, name), hints[name]
        if isinstance(value, list):
            value = tuple(value)
            object.__setattr__(described, name, value)
        if not _is(value, hint):
            shown = repr(value)
            shown = shown if len(shown) < 100 else shown[:100] + "..."
            wanted = getattr(hint, "__name__", None) if isinstance(hint, type) else str(hint)
            raise DescriptionError(f"{prefix}{name}={shown} is no {str(wanted).replace('typing.', '')}")


@contextlib.contextmanager
def reading(what: str, error: type[GpuJoinError] = DescriptionError) -> Iterator[None]:
    """Whatever goes wrong in taking apart what came from outside is that it is not what it should be.

    Args:
        what: that it should be.
        error: raised instead; errors of the pack pass.
    """
    try:
        yield
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
        pa.ArrowException,
    ) as wrong:
        if isinstance(wrong, GpuJoinError):
            raise
        raise error(f"this is no {what}: {type(wrong).__name__}: {wrong}") from wrong


def whole_number(name: str, value: object) -> int:
    """A number of milliseconds as int64 holds it.

    Raises:
        DescriptionError: it is none.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or abs(number) >= 1 << 63:
        raise DescriptionError(f"{name}={value!r} is no number of milliseconds")
    return number


def _is(value: object, hint: Any) -> bool:
    """Whether a value is of a type; text can be written as UTF-8, a number is less than `MAX_MS` either way."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_is(value, part) for part in parts)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(parts) == 2 and parts[1] is ...:
            return all(_is(v, parts[0]) for v in value)
        return len(value) == len(parts) and all(map(_is, value, parts))
    if hint is str or origin is typing.Literal:
        return isinstance(value, str) and _SURROGATE.search(value) is None
    if origin is Mapping:
        return isinstance(value, Mapping)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and abs(value) < MAX_MS
    if not isinstance(value, hint):
        return False
    if (dataclasses.is_dataclass(hint) or hasattr(hint, "_fields")) and not hasattr(hint, "checked"):
        return all(_is(getattr(value, name), kind) for name, kind in typing.get_type_hints(hint).items())
    return True
