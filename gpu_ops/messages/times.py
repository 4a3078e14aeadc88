"""Times and dates as texts in ISO 8601, of all the years that Spark has, and both ways.

A year of more than four digits, or before the year 0, has a sign, as Java's ``DateTimeFormatter.ISO_LOCAL_DATE`` and
Spark write it: ``+10000-01-01``, ``-0001-12-31``. Arrow reads and writes such years in no type, and counts years in 16
bits. The Gregorian calendar repeats after 400 years, so a far time is one of a near year, and so many periods.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.values import cast_plain

_YEARS: Final = 400
_DAYS: Final = 146_097
"""The calendar's period."""

_FIRST_DAY: Final = -719_528
_DAY_AFTER: Final = 2_932_897
"""0000-01-01 and 10000-01-01, in days since 1970: between them a year has four digits and no sign."""

_PER_DAY: Final = {"s": 86_400, "ms": 86_400_000, "us": 86_400_000_000, "ns": 86_400_000_000_000}
_FAR: Final = r"^(?P<year>[+-]?\d{4,7})(?P<rest>-\d{2}-\d{2}.*)$"
_NEAR: Final = r"^\d{4}-"
_AFTER: Final = 2800
_BEFORE: Final = 1200
"""Years that stand for far ones when a zone is asked for its offset: the last rule's, and local mean time."""


def time_texts(values: pa.Array) -> pa.Array:
    """Texts of n timestamps, ``2026-01-01T12:30:00.123456``, in UTC where they are instants; null for null."""
    unit = values.type.unit
    plain = values.cast(pa.timestamp(unit, "UTC")).cast(pa.timestamp(unit))
    texts = _far_texts(plain, _PER_DAY[unit])
    return pc.replace_substring(plain.cast(pa.string()) if texts is None else texts, " ", "T", max_replacements=1)


def date_texts(values: pa.Array) -> pa.Array:
    """Texts of n dates, ``2026-01-01``; null for null."""
    days = values.cast(pa.date32())
    texts = _far_texts(days, 1)
    return days.cast(pa.string()) if texts is None else texts


def _far_texts(values: pa.Array, per_day: int) -> pa.Array | None:
    """Texts of values among which there are far years; None where there are none."""
    counted = values.cast(pa.int64() if per_day > 1 else pa.int32())
    ends = pc.min_max(counted).as_py()
    if ends["min"] is None or (ends["min"] >= _FIRST_DAY * per_day and ends["max"] < _DAY_AFTER * per_day):
        return None
    numbers = pc.fill_null(counted.cast(pa.int64()), 0).to_numpy()
    days = np.floor_divide(numbers, per_day)
    far = (days < _FIRST_DAY) | (days >= _DAY_AFTER)
    periods = np.where(far, np.floor_divide(days - _FIRST_DAY, _DAYS), 0)
    near = pa.array(numbers - periods * _DAYS * per_day, mask=counted.is_null().to_numpy(zero_copy_only=False))
    texts = near.cast(counted.type).cast(values.type).cast(pa.string())
    years = pc.fill_null(pc.utf8_slice_codeunits(texts, 0, 4), "0").cast(pa.int64()).to_numpy() + _YEARS * periods
    digits = pc.utf8_lpad(pa.array(np.abs(years)).cast(pa.string()), 4, "0")
    signs = pa.array(["", "+", "-"]).take(pa.array(np.where(years < 0, 2, np.where(far, 1, 0))))
    return pc.binary_join_element_wise(signs, digits, pc.utf8_slice_codeunits(texts, 4), "")


def read_times(texts: pa.Array, kind: pa.DataType, zone: str) -> pa.Array:
    """Timestamps or dates of n texts.

    Args:
        texts: of any years; null for null.
        kind: a timestamp in microseconds, with a zone or without, or a date.
        zone: of texts that name none, where they are to be instants.

    Raises:
        ArrowInvalid: a text that is none, or whose time the type has no place for.
    """
    try:
        return cast_plain(texts, kind, zone)
    except pa.ArrowInvalid as error:
        wrong = error
        parts = pc.extract_regex(pc.if_else(pc.match_substring_regex(texts, _NEAR), None, texts), _FAR)
        far = parts.is_valid().to_numpy(zero_copy_only=False)
        if not far.any():
            raise
    years = pc.if_else(pa.array(far), parts.field("year"), "0")
    years = pc.replace_substring_regex(years, r"^\+", "").cast(pa.int64()).to_numpy()
    near = np.mod(years, _YEARS) + np.where(years > 0, _AFTER, _BEFORE)
    moved = pc.binary_join_element_wise(pa.array(near).cast(pa.string()), parts.field("rest"), "")
    try:
        found = cast_plain(pc.if_else(pa.array(far), moved, texts), kind, zone)
    except pa.ArrowInvalid:
        raise wrong from None
    per_day, number = (1, pa.int32()) if pa.types.is_date(kind) else (_PER_DAY[kind.unit], pa.int64())
    periods = pa.array(np.where(far, (years - near) // _YEARS, 0))
    shift = pc.multiply_checked(periods, _DAYS * per_day)
    return pc.add_checked(found.cast(number).cast(pa.int64()), shift).cast(number).cast(kind)


def instants(values: pa.Array, unit: str, kind: pa.DataType) -> pa.Array:
    """Timestamps of n numbers since 1970, in UTC; of nanoseconds the microsecond that they are in, before 1970, too.

    Args:
        values: whole numbers.
        unit: ``ms``, ``us`` or ``ns``.
        kind: with a zone, or without.

    Raises:
        ArrowInvalid: one that the type has no place for.
    """
    if unit == "ns" and kind.unit == "us":
        floor = np.floor_divide(pc.fill_null(values, 0).to_numpy(), 1000)
        values, unit = pa.array(floor, mask=values.is_null().to_numpy(zero_copy_only=False)), "us"
    return values.cast(pa.timestamp(unit, kind.tz)).cast(kind)
