"""The manifest of a state folder: what its state belongs to."""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import json
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa

from gpu_ops.errors import StateError
from gpu_ops.state.files import Files

FORMAT: Final = 2
"""The highest version of what lies below a state folder that this code reads."""

SPARK: Final = "spark"
"""Rows go to partitions by Spark's HashPartitioning; a folder where they do not, or that was cut anew, has format 2."""

MANIFEST: Final = "manifest.json"

FINISHED: Final = "finished.json"
"""Beside the manifest once what was left to be said has been handed out."""

_ADVICE = "give state= a new folder (and the query a new checkpoint), or delete this one"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a state folder belongs to.

    Attributes:
        description: the join as `Join.to_json` writes it.
        partitions: how many partitions the state is cut into.
        query_id: Spark's id of the query, the same over restarts from one checkpoint.
        distribution: by what hash rows go to partitions: `SPARK`, or `gpu_ops.spark.packing.DISTRIBUTION`.
        generation: how often the folder was cut anew (`gpu_ops.rescale`).
    """

    description: str
    partitions: int
    query_id: str
    distribution: str = SPARK
    generation: int = 0

    def content(self, files: Files) -> Files:
        """Where the partitions of a state folder with this manifest lie: in it, or in a folder of their generation."""
        return files.below(f"g{self.generation}") if self.generation else files

    def to_json(self) -> str:
        """The file's content; schemas are repeated in readable form."""
        description = json.loads(self.description)
        content = {
            "format": 1 if self.distribution == SPARK and not self.generation else FORMAT,
            "query_id": self.query_id,
            "partitions": self.partitions,
            "distribution": self.distribution,
            "generation": self.generation,
            "created": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
            "schemas": {
                source["name"]: {field.name: str(field.type) for field in _schema(source)}
                for source in description.get("inputs", ())
            },
            "join": description,
        }
        return json.dumps(content, indent=1)

    @classmethod
    def read(cls, files: Files) -> Manifest | None:
        """A folder's manifest, or None when it has none.

        Raises:
            StateError: a manifest that is damaged or of a newer format.
        """
        content = files.read(MANIFEST)
        if content is None:
            return None
        name = files.name(MANIFEST)
        try:
            data = json.loads(content.to_pybytes())
            version = data["format"]
            if isinstance(version, int) and version > FORMAT:
                raise StateError(
                    f"{name} has format {version}, this version of gpu-join reads up to {FORMAT}: "
                    "upgrade gpu-join on the driver and its executors"
                )
            join = json.dumps(data["join"], sort_keys=True)
            return cls(
                join,
                int(data["partitions"]),
                str(data["query_id"]),
                str(data.get("distribution", SPARK)),
                int(data.get("generation", 0)),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise StateError(f"{name} is damaged ({error!r}); restore it from a backup, or {_ADVICE}") from error

    @classmethod
    def of(cls, files: Files) -> Manifest:
        """The manifest of a state folder.

        Raises:
            StateError: it is none, or its manifest is damaged or of a newer format.
        """
        found = cls.read(files)
        if found is None:
            raise StateError(f"{files.location} is no state folder: there is no {files.name(MANIFEST)}")
        return found

    def check(self, found: Manifest, location: str) -> None:
        """Refuses a folder that belongs to something else.

        Args:
            found: the folder's manifest.
            location: the folder.

        Raises:
            StateError: what differs, and what to do.
        """
        if found.query_id != self.query_id:
            raise StateError(
                f"state folder {location} belongs to query {found.query_id}, this is query {self.query_id}. "
                "A state folder belongs to one query: restart that query from its checkpoint, or "
                f"{_ADVICE}"
            )
        mine, theirs = json.loads(self.description), json.loads(found.description)
        difference = next(_differences(theirs, mine), None)
        if difference is not None:
            raise StateError(
                f"state folder {location} belongs to another join: {difference}. "
                f"Describe the join as it was, or {_ADVICE}"
            )
        if found.distribution != self.distribution:
            raise StateError(
                f"state folder {location} was written by a query whose inputs "
                f"{'do not' if found.distribution == SPARK else 'do'} come from gpu_ops.read_files(), and this one's "
                f"{'do not' if self.distribution == SPARK else 'do'}: rows are distributed otherwise. "
                f"Read the inputs as before, or {_ADVICE}"
            )
        if found.partitions != self.partitions:
            raise StateError(
                f"state folder {location} is cut into {found.partitions} partitions, the query asks for "
                f"{self.partitions}: go back to {found.partitions}, or stop the query and run "
                f"gpu-join rescale {location} --partitions {self.partitions}"
            )


def ensure(files: Files, manifest: Manifest, *, create: bool) -> Manifest | None:
    """Checks a folder's manifest, or gives it one.

    Safe for several partitions that open a folder at once.

    Args:
        files: the folder.
        manifest: what it must belong to.
        create: whether a folder without one gets it.

    Returns:
        The folder's manifest, or None where there is none and ``create`` is false.

    Raises:
        StateError: the folder belongs to something else, or holds state but no manifest.
    """
    found = Manifest.read(files)
    if found is None and files.folders("p"):
        found = Manifest.read(files)  # another partition may just have been quicker
        if found is None:
            name = files.name(MANIFEST)
            raise StateError(f"{name} is missing beside stored state; restore it, or {_ADVICE}")
    if found is None:
        if not create:
            return None
        files.create(MANIFEST, manifest.to_json().encode())
        found = Manifest.read(files)
        if found is None:
            raise StateError(f"{files.name(MANIFEST)} was written and cannot be found")
    manifest.check(found, files.location)
    return found


def check_open(files: Files) -> None:
    """Refuses a folder whose input has ended.

    Raises:
        StateError: `gpu_ops.finish` was called on it.
    """
    if files.stamp(FINISHED) is not None:
        raise StateError(
            f"state folder {files.location} is finished: gpu_ops.finish() has handed out what was left, so more "
            "input would contradict it. Start the query afresh with a new folder and a new checkpoint, or "
            "take that back with gpu_ops.reopen()"
        )


def _schema(source: dict[str, Any]) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(source["schema"])))


def _differences(was: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """What differs between two descriptions, most telling first."""
    if len(was.get("inputs", ())) != len(now.get("inputs", ())):
        yield f"it had {len(was['inputs'])} inputs, now {len(now['inputs'])}"
    sources = list(zip(was.get("inputs", ()), now.get("inputs", ()), strict=False))
    for old, new in sources:
        if old["name"] != new["name"]:
            yield f"an input was called {old['name']!r}, now {new['name']!r}"
        if old["schema"] != new["schema"]:
            yield from _schema_differences(old["name"], _schema(old), _schema(new))
    for old, new in sources:
        for option in sorted((old.keys() | new.keys()) - {"schema", "name"}):
            if old.get(option) != new.get(option):
                yield f"input '{old['name']}' had {option}={old.get(option)!r}, now {new.get(option)!r}"
    for (_, source), old, new in zip(sources[1:], was.get("steps", ()), now.get("steps", ()), strict=False):
        for option in ("how", "on", "where"):
            if old[option] != new[option]:
                yield f"the step to '{source['name']}' had {option}={old[option]!r}, now {new[option]!r}"
    for option in sorted((was.keys() | now.keys()) - {"inputs"}):
        if was.get(option) != now.get(option):
            yield f"it had {option}={was.get(option)!r}, now {now.get(option)!r}"


def _schema_differences(name: str, was: pa.Schema, now: pa.Schema) -> Iterator[str]:
    for field in was:
        if field.name not in now.names:
            yield f"input '{name}' had a column {field.name!r} ({field.type}), now it has none"
    for field in now:
        if field.name not in was.names:
            yield f"input '{name}' has a column {field.name!r} ({field.type}) that it had not"
    for field in was:
        other = now.field(field.name) if field.name in now.names else field
        if field.type != other.type:
            yield f"input '{name}': column {field.name!r} was {field.type}, now {other.type}"
        elif field.nullable != other.nullable:
            yield f"input '{name}': column {field.name!r} was nullable={field.nullable}, now {other.nullable}"
    if was.names != now.names:
        yield f"input '{name}': the order of columns was {', '.join(was.names)}, now {', '.join(now.names)}"
    else:
        yield f"input '{name}': the schema was {was}, now {now}"
