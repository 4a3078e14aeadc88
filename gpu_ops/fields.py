"""The fields of what a user writes down: checked by their declared types, and by them written as JSON and read."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import functools
import itertools
import operator
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from gpu_ops.errors import DescriptionError, GpuJoinError

_SURROGATE: Final = re.compile("[\ud800-\udfff]")
"""What text has that cannot be written as UTF-8."""

MAX_MS: Final = 1 << 60
"""Durations, milliseconds, are smaller than this: added to a time they fit in int64."""


ABSENT: Final = {"absent": True}
"""Metadata of a dataclass's field: its JSON lacks it where it has its default, as before there was the field."""


def check_fields(described: Any, prefix: str = "") -> None:
    """Refuses a value of another type than its field's; a list becomes the tuple that it stands for.

    Args:
        described: a dataclass; its own check names what there is of ``how`` and ``emit``.
        prefix: of the message.

    Raises:
        DescriptionError: names the field and shows the value.
    """
    kind: Any = type(described)
    hints = hints_of(kind)
    for name in (field.name for field in dataclasses.fields(described)):
        value, hint = getattr(described, name), hints[name]
        if isinstance(value, list):
            value = tuple(value)
            object.__setattr__(described, name, value)
        if not fits(value, hint):
            shown = repr(value)
            shown = shown if len(shown) < 100 else shown[:100] + "..."
            wanted = getattr(hint, "__name__", None) if isinstance(hint, type) else str(hint)
            raise DescriptionError(f"{prefix}{name}={shown} is no {str(wanted).replace('typing.', '')}")
        if typing.get_origin(hint) is typing.Literal and name not in ("how", "emit"):
            known = typing.get_args(hint)
            if value not in known:
                raise DescriptionError(f"{prefix}{name}={value!r}; it is one of {', '.join(known)}")


def unwritten(described: Any) -> set[str]:
    """The fields that the JSON of a dataclass lacks; see `ABSENT`."""
    fields = dataclasses.fields(described)
    return {f.name for f in fields if f.metadata.get("absent") and getattr(described, f.name) == f.default}


def encoded(value: Any) -> Any:
    """A value as JSON takes it: by its own ``to_dict``, else dataclasses as objects, and tuples as lists."""
    if hasattr(value, "to_dict"):
        return value.to_dict()
    if isinstance(value, pa.Schema):
        return base64.b64encode(value.remove_metadata().serialize().to_pybytes()).decode()
    if dataclasses.is_dataclass(value):
        left_out = unwritten(value)
        names = [f.name for f in dataclasses.fields(value) if f.name not in left_out]
        return {name: encoded(getattr(value, name)) for name in names}
    if isinstance(value, tuple):
        optional = len(
            getattr(value, "_field_defaults", ())
        )  # of a named tuple those at the end that are null are absent
        last = len(value)
        while last > len(value) - optional and value[last - 1] is None:
            last -= 1
        return [encoded(part) for part in value[:last]]
    return value


def decoded(kind: Any, value: Any) -> Any:
    """The inverse of `encoded`, a value of a field's type; what goes wrong is an error of Python's, see `reading`."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        one, *others = (part for part in parts if part is not types.NoneType)
        return value if value is None or others else decoded(one, value)
    if origin is tuple:
        kinds = itertools.repeat(parts[0], len(value)) if parts[-1] is ... else parts
        return tuple(decoded(part, x) for part, x in zip(kinds, _list(value), strict=True))
    if hasattr(kind, "from_dict"):
        return kind.from_dict(value)
    if kind is pa.Schema:
        return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(value)))
    if hasattr(kind, "__dataclass_fields__"):
        return kind(**{name: decoded(hints_of(kind)[name], part) for name, part in value.items()})
    if hasattr(kind, "_fields"):
        named = zip(kind._fields[: len(value)], _list(value), strict=True)
        return kind(*(decoded(hints_of(kind)[name], part) for name, part in named))
    return value


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


@functools.cache
def hints_of(kind: type) -> Mapping[str, Any]:
    """The types of a class's fields."""
    return typing.get_type_hints(kind)


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return value


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


def fits(value: object, hint: Any, least: int = 1 - MAX_MS, most: int = MAX_MS - 1) -> bool:
    """Tells whether a value is of a type; text can be written as UTF-8.

    Args:
        value: any.
        hint: the type.
        least: of whole numbers in it.
        most: likewise.
    """
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, part, least, most) for part in parts)
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        if len(parts) == 2 and parts[1] is ...:
            return all(fits(v, parts[0], least, most) for v in value)
        kinds = zip(value, parts, strict=False)
        return len(value) == len(parts) and all(fits(v, part, least, most) for v, part in kinds)
    if hint is str or origin is typing.Literal:
        return isinstance(value, str) and _SURROGATE.search(value) is None
    if origin is Mapping:
        return isinstance(value, Mapping)
    if origin is Sequence:
        return isinstance(value, list | tuple) and all(fits(v, parts[0], least, most) for v in value)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    if not isinstance(value, hint):
        return False
    if (dataclasses.is_dataclass(hint) or hasattr(hint, "_fields")) and not hasattr(hint, "checked"):
        return all(fits(getattr(value, name), kind, least, most) for name, kind in hints_of(hint).items())
    return True
