"""The log of a Delta table: which commits there are, what each did, and which schema and protocol were in force.

The rules are those of Delta's PROTOCOL.md. A commit's schema is the last one set at or before it, in a commit or in a
checkpoint of any kind (classic, in parts, named by a UUID).
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq

from gpu_ops.files.file_systems import file_system_of

LOG: Final = "_delta_log"

Action = Mapping[str, Any]

_KNOWN_FEATURES: Final = frozenset(
    {"columnMapping", "deletionVectors", "timestampNtz", "typeWidening", "typeWidening-preview", "v2Checkpoint",
     "vacuumProtocolCheck"}
)  # fmt: skip
"""Reader features that are implemented; those of writers only change nothing for who reads."""

_TABLE_FEATURES_VERSION: Final = 3
_MAPPING_VERSION: Final = 2
_UNORDERED_TIMES: Final = 100
"""Commits in which Delta looks for one whose file is newer than that of the next."""

_OF_MAPPING: Final = "delta.columnMapping."
_HEADERS: Final = ("metaData", "protocol")
_MOST_REMEMBERED: Final = 64


@dataclasses.dataclass(frozen=True)
class TableState:
    """The schema, options and protocol of a table at a version.

    Attributes:
        metadata: the action ``metaData``.
        protocol: the action ``protocol``.
    """

    metadata: Action
    protocol: Action

    @property
    def table_id(self) -> str:
        """The table's id, which a table made anew in the same place does not have."""
        return str(self.metadata["id"])

    @property
    def fields(self) -> list[Action]:
        """The columns, as the log spells them; what it says of mapping is left out where that is ``none``."""
        hook = _unmapped if self.mapping == "none" else None
        return list(json.loads(self.metadata["schemaString"], object_hook=hook)["fields"])

    @property
    def partitioned_by(self) -> frozenset[str]:
        """The columns whose values are in the log, and not in data files."""
        return frozenset(self.metadata.get("partitionColumns") or ())

    @property
    def mapping(self) -> str:
        """The way columns are found in data files: ``none``, by their own name, or ``name`` or ``id``."""
        supported = self._reader_version == _MAPPING_VERSION or "columnMapping" in self._features
        return str(self._configuration.get("delta.columnMapping.mode", "none")) if supported else "none"

    @property
    def has_feed(self) -> bool:
        """Tells whether the table records its changes."""
        return str(self._configuration.get("delta.enableChangeDataFeed", "false")).lower() == "true"

    def check(self) -> None:
        """Refuses what would be misread.

        Raises:
            ValueError: names the feature of the protocol, or the format.
        """
        if self._reader_version > _TABLE_FEATURES_VERSION:
            raise ValueError(f"the table's minReaderVersion is {self._reader_version}, and none above 3 is known here")
        unknown = sorted(self._features - _KNOWN_FEATURES)
        if unknown:
            raise ValueError(f"the table has the reader feature {unknown[0]!r}, which is not read here")
        provider = (self.metadata.get("format") or {}).get("provider", "parquet")
        if provider != "parquet":
            raise ValueError(f"the table's files are of format {provider!r}, and not Parquet")

    @property
    def _reader_version(self) -> int:
        return int(self.protocol["minReaderVersion"])

    @property
    def _features(self) -> frozenset[str]:
        return frozenset(self.protocol.get("readerFeatures") or ())

    @property
    def _configuration(self) -> Mapping[str, str]:
        return dict(self.metadata.get("configuration") or {})


def _unmapped(part: Action) -> Action:
    return {name: value for name, value in part.items() if not name.startswith(_OF_MAPPING)}


_remembered: dict[tuple[str, int, int], TableState] = {}
"""By a commit's file, its time and its size: a reader that goes on from the one before reads nothing again."""


class Log:
    """The log of a table: a folder of commits and checkpoints.

    Args:
        table: the folder, as Hadoop writes it.
        input_name: for errors.
    """

    def __init__(self, table: str, input_name: str) -> None:
        self._table = table
        self._files, self._path = file_system_of(f"{table}/{LOG}", input_name)
        self._last: tuple[int, list[Action]] | None = None

    def versions(self) -> tuple[set[int], int]:
        """The versions whose commits are there, and the latest that any file speaks of; -1 for none.

        Raises:
            OSError: there is no such folder.
        """
        names = self._names()
        commits = {int(name[:-5]) for name in names if re.fullmatch(r"\d+\.json", name)}
        checkpoints = [int(name.partition(".")[0]) for name in names if re.match(r"\d+\.checkpoint\.", name)]
        return commits, max([*commits, *checkpoints], default=-1)

    def actions(self, version: int) -> list[Action]:
        """Reads the actions of a commit, in their order.

        Raises:
            OSError: there is no such commit.
            ValueError: it is no JSON.
        """
        if self._last is None or self._last[0] != version:
            self._last = version, _actions_of(self._read(_commit(version)))
        return self._last[1]

    def state(self, version: int) -> TableState:
        """Finds the schema, options and protocol at a version.

        Raises:
            ValueError: the log does not say.
        """
        found = self._at_or_before(version)
        if len(found) < len(_HEADERS):
            found = self._unchanged_until_checkpoint(version, found) | found
        if len(found) < len(_HEADERS):
            raise ValueError(
                f"{LOG} does not have the schema of version {version} any more: commits before it are gone, and no "
                "checkpoint is in their place"
            )
        return self._remember(version, TableState(found["metaData"], found["protocol"]))

    def _at_or_before(self, version: int) -> dict[str, Action]:
        found: dict[str, Action] = {}
        checkpoints: Mapping[int, list[str]] | None = None
        for number in range(version, -1, -1):
            stamp = self._stamp(number)
            known = None if stamp is None else _remembered.get(stamp)
            if known is not None:
                return {"metaData": known.metadata, "protocol": known.protocol} | found
            if stamp is not None:
                found = _headers(self.actions(number)) | found
            if len(found) < len(_HEADERS):
                checkpoints = _checkpoints(self._names()) if checkpoints is None else checkpoints
                found = self._checkpointed(checkpoints.get(number, [])) | found
            if len(found) == len(_HEADERS) or stamp is None:
                break  # what a commit that is gone had changed, nobody knows
        return found

    def _unchanged_until_checkpoint(self, version: int, found: Mapping[str, Action]) -> dict[str, Action]:
        """Reads them from a later checkpoint, if all commits until then are there and changed nothing of them."""
        checkpoints = _checkpoints(self._names())
        for number in range(version, max(checkpoints, default=-1) + 1):
            if number > version and (
                self._stamp(number) is None or _headers(self.actions(number)).keys() - found.keys()
            ):
                break
            if number in checkpoints:
                return self._checkpointed(checkpoints[number])
        return {}

    def latest_state(self) -> TableState:
        """Finds the schema and protocol at the latest version; errors as those of `state` and `versions`."""
        return self.state(self.versions()[1])

    def committed_at(self, version: int, actions: Iterable[Action]) -> int:
        """When a version was committed, in milliseconds since 1970.

        It is the commit's own ``inCommitTimestamp``; without one, the time of its file, or just after that of the
        commit before where that one's file is newer.

        Args:
            version: of a commit that is there.
            actions: what it did.
        """
        for action in actions:
            written = (action.get("commitInfo") or {}).get("inCommitTimestamp")
            if written is not None:
                return int(written)
        numbers = range(max(version - _UNORDERED_TIMES, 0), version + 1)
        infos = self._files.get_file_info([f"{self._path}/{_commit(number)}" for number in numbers])
        at = -1
        for info in infos:
            if info.mtime_ns is not None:
                at = max(info.mtime_ns // 1_000_000, at + 1)
        return at

    def _names(self) -> list[str]:
        return [file.base_name for file in self._files.get_file_info(pafs.FileSelector(self._path))]

    def _read(self, name: str) -> bytes:
        with self._files.open_input_stream(f"{self._path}/{name}", compression=None) as stream:
            return bytes(stream.read())

    def _stamp(self, version: int) -> tuple[str, int, int] | None:
        name = _commit(version)
        info = self._files.get_file_info(f"{self._path}/{name}")
        return (f"{self._table}/{name}", info.mtime_ns or 0, info.size) if info.is_file else None

    def _remember(self, version: int, state: TableState) -> TableState:
        stamp = self._stamp(version)
        if stamp is not None:
            if len(_remembered) >= _MOST_REMEMBERED:
                _remembered.clear()
            _remembered[stamp] = state
        return state

    def _checkpointed(self, names: list[str]) -> dict[str, Action]:
        """The two actions of a checkpoint, which a sidecar never has."""
        found: dict[str, Action] = {}
        for name in names:
            if name.endswith(".json"):
                found |= _headers(_actions_of(self._read(name)))
                continue
            file = pq.ParquetFile(pa.BufferReader(self._read(name)))
            for header in set(_HEADERS) & set(file.schema_arrow.names):
                column = file.read([header])[header]
                for row in column.filter(pc.is_valid(column)).to_pylist():
                    found[header] = _as_action(row)
        return found


def _commit(version: int) -> str:
    return f"{version:020}.json"


def _actions_of(lines: bytes) -> list[Action]:
    return [json.loads(line) for line in lines.split(b"\n") if line.strip()]


def _headers(actions: Iterable[Action]) -> dict[str, Action]:
    return {name: action[name] for action in actions for name in _HEADERS if action.get(name) is not None}


def _as_action(row: dict[str, Any]) -> Action:
    """A row of a checkpoint as the log has it: Arrow gives maps as pairs."""
    return row | ({"configuration": dict(row["configuration"] or ())} if "configuration" in row else {})


def _checkpoints(names: Iterable[str]) -> dict[int, list[str]]:
    """The files of one checkpoint for each version that has a whole one."""
    found: dict[int, list[str]] = {}
    parts: dict[tuple[int, int], list[str]] = {}
    for name in sorted(names):
        of_one = re.fullmatch(r"(\d+)\.checkpoint(?:\.[0-9a-fA-F-]{36}\.json|(?:\.[0-9a-fA-F-]{36})?\.parquet)", name)
        of_some = re.fullmatch(r"(\d+)\.checkpoint\.\d{10}\.(\d{10})\.parquet", name)
        if of_one is not None:
            found[int(of_one.group(1))] = [name]
        elif of_some is not None:
            parts.setdefault((int(of_some.group(1)), int(of_some.group(2))), []).append(name)
    return {version: files for (version, count), files in parts.items() if len(files) == count} | found
