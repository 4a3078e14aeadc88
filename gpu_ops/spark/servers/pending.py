"""What a partition keeps of a micro-batch that may be repeated, and what makes two commands be about one state."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pyarrow as pa

from gpu_ops.spark.exchange.command import ApplyCommand
from gpu_ops.state.durable import Record, Times
from gpu_ops.state.files import Stamp


class Recorded(NamedTuple):
    """What a micro-batch that is repeated went by the first time."""

    clock_ms: int
    watermark: int | None
    backlog: bool = False


@dataclasses.dataclass(frozen=True)
class Applied:
    """The answer to one micro-batch."""

    changelog: pa.Table
    metrics: dict[str, int | float]
    backend: str
    backend_reason: str


class Answer(NamedTuple):
    """What a micro-batch was answered, for those who ask for it again.

    Attributes:
        run_id: of the query; in another run it may have other rows.
        rows: how many came.
        applied: the answer.
    """

    run_id: str
    rows: int
    applied: Applied


@dataclasses.dataclass
class Pending:
    """A micro-batch that was answered and may have to be repeated."""

    batch_id: int
    clock_ms: int
    stamp: Stamp | None
    """Of its record, where there is a state folder."""
    record: Record | None
    """Its input, where there is none."""
    times: Times
    """What is known of event time after it."""
    backlog: bool = False
    """Whether it was taken in silently."""
    prepared: bool = True
    """Whether the engine has it prepared; not after a repetition that failed."""
    answer: Answer | None = None
    """Where several ask for it."""


def identity(command: ApplyCommand) -> tuple[object, ...]:
    """What two commands must have in common to be about one state."""
    options = tuple(sorted((name, repr(value)) for name, value in command.options.items()))
    return (
        command.join_id, command.query_id, command.state, command.description,
        command.partition, command.partitions, command.backend, command.distribution, command.join_number,
        options,
    )  # fmt: skip
