"""What an operator does with the end of its input and with a backlog, after Flink's ``OperatorAttributes``."""

from __future__ import annotations

from typing import NamedTuple

from gpu_ops.bounded import CoGroup, Description
from gpu_ops.errors import DescriptionError
from gpu_ops.joins import Join


class Attributes(NamedTuple):
    """Of one operator.

    Flink 2.3 knows the first two (``outputOnlyAfterEndOfStream``, ``internalSorterSupported``; FLIP-331); the third is
    what FLIP-327 asks of an operator.
    """

    output_only_after_end_of_input: bool
    """It keeps its input as it comes, without output and counts, and runs as a batch operator at the end."""
    sorts_itself: bool
    """It needs no sorted input."""
    switches_from_backlog: bool
    """It can take a backlog in silently, say its net result, and go on live."""


def attributes(description: Description) -> Attributes:
    """The attributes of the operator that a description leads to."""
    at_end = description.emit == "at_end"
    merges = isinstance(description, CoGroup) or (isinstance(description, Join) and description.interval is None)
    return Attributes(at_end, at_end and merges, why_no_backlog(description) is None)


def why_no_backlog(description: Description) -> str | None:
    """What keeps an operator from beginning with a backlog; None if it can."""
    if description.emit == "at_end":
        return "with emit='at_end' all input is taken in silently"
    if isinstance(description, Join) and description.interval is not None:
        return "an interval join goes by its watermark from the first row on"
    for source in description.inputs:
        if source.ttl_ms is not None:
            return f"the rows of input '{source.name}' expire a ttl= after they came, which a backlog does not say"
    return None


def check_backlog(description: Description) -> None:
    """Refuses a backlog where an operator cannot begin with one.

    Raises:
        DescriptionError: says why.
    """
    why = why_no_backlog(description)
    if why is not None:
        raise DescriptionError(f"no backlog here: {why}")
