"""Files as the rows of a Delta table: a commit of its log names those of a micro-batch."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlsplit

import pyarrow as pa

from gpu_ops.errors import DescriptionError, NotBuiltError
from gpu_ops.spark.tasks.file import WrittenFile
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files


class DeltaCommit:
    """Files lie where they will be, and a commit of Delta's log names them, with the query's id and the micro-batch.

    Args:
        place: the table's folder.
        partition_by: its columns of partitions.
    """

    def __init__(self, place: Files, partition_by: Sequence[str]) -> None:
        try:
            import deltalake  # noqa: PLC0415 - not installed by default
        except ImportError as error:
            raise NotBuiltError("format='delta' needs the package deltalake: pip install 'gpu-join[delta]'") from error
        self._delta, self._partition_by = deltalake, list(partition_by)
        self._location, self._storage = str(place.address), _storage_options(place.address)
        self._table: Any = None

    def done(self, query: str, number: int) -> bool:
        """See `gpu_ops.spark.sinks.files.Commit`."""
        if self._table is None:
            return False
        self._table.update_incremental()
        version = self._table.transaction_version(query)
        return version is not None and version >= number

    def commit(self, query: str, number: int, files: Sequence[WrittenFile], schema: pa.Schema) -> None:
        """See `gpu_ops.spark.sinks.files.Commit`.

        Raises:
            DescriptionError: the table has other columns.
        """
        schema = pa.schema([field.with_nullable(True) for field in schema])
        if self._table is None:
            delta = self._delta.DeltaTable
            made = delta.create(
                self._location, schema, mode="ignore", partition_by=self._partition_by or None,
                storage_options=self._storage,
            )  # fmt: skip
            self._table = made
            there, wanted = self._columns(made.schema()), self._columns(self._delta.Schema.from_arrow(schema))
            if there != wanted or made.metadata().partition_columns != self._partition_by:
                raise DescriptionError(
                    f"the table {self._location} has the columns {', '.join(there)}, partitioned by "
                    f"{', '.join(made.metadata().partition_columns) or 'none'}; the changelog has {', '.join(wanted)}, "
                    f"partitioned by {', '.join(self._partition_by) or 'none'}"
                )
            if self.done(query, number):
                return
        now = int(time.time() * 1000)
        transaction = self._delta.transaction
        added = [
            transaction.AddAction(
                quote(file.path, safe="/="), file.size, file.partition, now, True, json.dumps(file.statistics)
            )
            for file in files
        ]
        mark = transaction.Transaction(query, number, now)
        self._table.create_write_transaction(
            added, "append", schema, self._partition_by or None,
            commit_properties=transaction.CommitProperties(app_transactions=[mark]),
        )  # fmt: skip

    @staticmethod
    def _columns(schema: Any) -> list[str]:
        return [f"{field.name} {field.type}" for field in schema.fields]

    def tidy(self, number: int) -> None:
        """Files that no commit names are for Delta's ``vacuum``."""


def _storage_options(address: StateAddress) -> dict[str, str] | None:
    """What ``deltalake`` has to know to open a table: of an S3 URI its credentials and options.

    Raises:
        NotBuiltError: neither local nor S3.
    """
    if address.path is not None:
        return None
    parts = urlsplit(address.secret_uri)
    if parts.scheme != "s3":
        raise NotBuiltError(f"format='delta' writes to local folders and s3://, not to {address}")
    user, _, secret = parts.netloc.rpartition("@")[0].partition(":")
    options = dict(parse_qsl(parts.query))
    protocol, endpoint = options.get("scheme", "https"), options.get("endpoint_override", "")
    found = {
        "AWS_ACCESS_KEY_ID": unquote(user),
        "AWS_SECRET_ACCESS_KEY": unquote(secret),
        "AWS_REGION": options.get("region", ""),
        "AWS_ENDPOINT_URL": endpoint if "://" in endpoint or not endpoint else f"{protocol}://{endpoint}",
    }
    if found["AWS_ENDPOINT_URL"].startswith("http:"):
        found["AWS_ALLOW_HTTP"] = "true"
    return {name: value for name, value in found.items() if value}
