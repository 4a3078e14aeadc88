"""What is known of the inputs of a query."""

from __future__ import annotations

import dataclasses

import pyarrow as pa

from gpu_ops.descriptions.inputs import Updates


@dataclasses.dataclass(frozen=True)
class Table:
    """An input of a query.

    Attributes:
        name: how the query calls it; case does not matter.
        schema: its columns, the row-kind column left out; whether a field is nullable counts.
        row_kind: the column that holds the row kind, or None.
        unique_key: columns that identify a row among the live ones, or None.
        updates: whether an update's old row may be missing.
        event_times: its event-time columns: what ``withWatermark`` or ``stream(event_time=)`` named.
        sequence_by: a column that orders the changes of a micro-batch, or None.
        ttl_ms: milliseconds after its last write at which a row is forgotten, or None.
        grows: whether rows are never taken back although there are row kinds: an interval join's changelog.
    """

    name: str
    schema: pa.Schema
    row_kind: str | None = None
    unique_key: tuple[str, ...] | None = None
    updates: Updates = "upsert"
    event_times: tuple[str, ...] = ()
    sequence_by: str | None = None
    ttl_ms: int | None = None
    grows: bool = False

    @property
    def insert_only(self) -> bool:
        """Whether rows are never taken back."""
        return (self.row_kind is None or self.grows) and self.unique_key is None

    @property
    def upserts(self) -> bool:
        """Whether a row may be replaced without being taken back, so that no filter can stand below the join."""
        return self.unique_key is not None and self.updates == "upsert"

    @property
    def changes(self) -> str:
        """What it brings, in a word or two."""
        return "upserts" if self.upserts else "insert-only" if self.insert_only else "retractions"
