"""The manifest of a state folder: what its state belongs to."""

from __future__ import annotations

import base64
import dataclasses
import datetime as dt
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import pyarrow as pa

from gpu_ops.descriptions.dataflow import Dataflow
from gpu_ops.descriptions.description import as_written
from gpu_ops.descriptions.kinds import from_json
from gpu_ops.errors import ConditionError, StateError
from gpu_ops.state.files import Files

FORMAT: Final = 4
"""The version of what lies below a state folder that this code writes, where no card reads Parquet files.

Since format 2 a folder may be cut anew, and rows may be distributed by `ARROW`. Since format 3 every file
says what it belongs to, see `Manifest.facts`. Since format 4 a record may name other files with its rows. Folders of
earlier formats are taken over as they are.
"""

OF_CARD: Final = 5
"""The version where one does: a record may name Parquet files with its rows."""

GOES_ON: Final = 6
"""The version of a folder that a change of a query made, the highest that this code reads: a snapshot may name files of
another folder, which are its state (`gpu_ops.state.durable.PartitionLog.go_on_from`)."""

SPARK: Final = "spark"
"""Rows went to partitions by Spark's HashPartitioning, as in earlier versions; see `Manifest.check_cut`."""

ARROW: Final = "arrow"
"""Rows go to partitions by `gpu_ops.spark.wire.hashes.partition_of`."""

MANIFEST: Final = "manifest.json"

LATEST: Final = "latest"
"""The folder in a join's folder that has the states of its upsert inputs' latest rows, by the inputs' numbers."""

FINISHED: Final = "finished.json"
"""Beside the manifest once the output at the end of input has been handed out."""

_OPTIONAL: Final = ("union_order", "sealed", "reads_once")
"""Fields that a manifest has only where there is something to say."""

_ADVICE = "give state= a new folder (and the query a new checkpoint), or delete this one"


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The identity of a state folder: its description, query, partitions and format.

    Attributes:
        description: the join as `Join.to_json` writes it.
        partitions: how many partitions the state is cut into.
        query_id: Spark's id of the query, the same over restarts from one checkpoint.
        distribution: by what hash rows go to partitions: `SPARK` or `ARROW`.
        generation: how often the folder was cut anew (`gpu_ops.rescale`).
        format: of what lies below the folder.
        join_number: which join of the query, counted from the sources on; None where that is unknown, as
            in folders of earlier versions.
        union_order: the numbers of the join's inputs as they stand in Spark's union, "1,0" or so: by that the query's
            checkpoint counts its sources; None where it is unknown, likewise.
        sealed: names the `gpu_ops.rescale` that is about to put other partitions in place of these; until it has, or
            has given up, no micro-batch is answered.
        reads_once: whether a source that several inputs are made of is read once, and so is one source of the query's
            checkpoint; None where it is read for each of them, as in earlier versions.
        raw: the file's content.
    """

    description: str
    partitions: int
    query_id: str
    distribution: str = ARROW
    generation: int = 0
    format: int = FORMAT
    join_number: int | None = None
    union_order: str | None = None
    sealed: str | None = None
    reads_once: bool | None = None
    raw: bytes = dataclasses.field(default=b"", repr=False, compare=False)

    def content(self, files: Files) -> Files:
        """The folder of the partitions: the state folder itself, or the one of their generation."""
        return files.below(f"g{self.generation}") if self.generation else files

    @property
    def bound(self) -> bool:
        """Tells whether every file of the folder names the query and partition it belongs to."""
        return self.format >= _BOUND

    @property
    def keeps_files(self) -> bool:
        """Tells whether a record of the folder may name other files."""
        return self.format >= _KEEPS_FILES

    @property
    def keeps_copies(self) -> bool:
        """Tells whether these may be Parquet files."""
        return self.format >= OF_CARD

    @property
    def goes_on(self) -> bool:
        """Tells whether the folder's first snapshots may be the state of another folder."""
        return self.format >= GOES_ON

    @property
    def of_dataflow(self) -> bool:
        """Tells whether the folder has the state of several operators, in one engine."""
        return isinstance(from_json(self.description), Dataflow)

    @functools.cached_property
    def digest(self) -> str:
        """SHA-256 of the join's description."""
        text = json.dumps(json.loads(self.description), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def facts(self, partition: int) -> dict[str, str]:
        """The metadata by which every file of a partition names what it belongs to."""
        number = {} if self.join_number is None else {"join_number": str(self.join_number)}
        return {
            "query_id": self.query_id,
            "join": self.digest,
            **number,
            "generation": str(self.generation),
            "partitions": str(self.partitions),
            "partition": str(partition),
        }

    def check_facts(self, found: Mapping[str, str], partition: int, name: str) -> None:
        """Refuses a file of this folder that belongs elsewhere.

        Args:
            found: its facts.
            partition: in whose folder it lies.
            name: the file, for errors.

        Raises:
            StateError: what it belongs to, or that it does not say so though all files of the folder must.
        """
        wanted = self.facts(partition)
        missing = [fact for fact in wanted if fact not in found]
        if missing and self.bound:
            raise StateError(f"{name} does not say to which {_CALLED[missing[0]]} it belongs. {_MISPLACED}")
        for fact, mine in wanted.items():
            theirs = found.get(fact, mine)
            if theirs != mine:
                shown = "another join than this folder" if fact == "join" else f"{_CALLED[fact]} {theirs}, not {mine}"
                raise StateError(f"{name} belongs to {shown}. {_MISPLACED}")

    def check_cut(self, location: str) -> None:
        """Refuses a folder that is being cut anew, or has to be.

        Raises:
            StateError: which, and what to do.
        """
        if self.distribution == SPARK and self.partitions > 1:
            raise StateError(
                f"state folder {location} was written by an earlier version of gpu-join, in which rows went to its "
                f"{self.partitions} partitions by another hash. Run gpu-join rescale {location} --partitions "
                f"{self.partitions}, which cuts it anew, and go on from the query's checkpoint"
            )
        if self.sealed is not None:
            raise StateError(
                f"state folder {location} is being cut anew by gpu-join rescale. Start the query when that is done; "
                "where it was interrupted, run it again first"
            )

    def why_moved(self, files: Files) -> StateError | None:
        """Why a micro-batch whose record was just written must not be answered, None where it may.

        Args:
            files: the folder of which this is the manifest as it was read.

        Returns:
            An error where the folder has been cut anew since, or is being.
        """
        content = files.read(MANIFEST)
        if content is not None and content.equals(pa.py_buffer(self.raw)):
            return None
        now = Manifest.of(files)
        if now == self:
            return None
        return StateError(
            f"state folder {files.location} was cut anew by gpu-join rescale while its query ran. This micro-batch was "
            "not applied, and nothing is lost: start the query again, it goes on from its checkpoint"
        )

    def to_json(self) -> str:
        """The file's content; schemas are repeated in readable form."""
        description = json.loads(self.description)
        fields = {name: getattr(self, name) for name in _FITS if name != "join"}
        content = {
            **{name: value for name, value in fields.items() if name not in _OPTIONAL or value is not None},
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
            StateError: a manifest that is damaged or of a newer format; it names the field and its value.
        """
        content = files.read(MANIFEST)
        if content is None:
            return None
        name = files.name(MANIFEST)
        try:
            data = json.loads(content.to_pybytes())
        except (ValueError, RecursionError) as error:
            raise _damaged(name, f"it is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise _damaged(name, "it holds no JSON object")
        version = _field(name, data, "format")
        if version > GOES_ON:
            raise StateError(
                f"{name} has format {version}, this version of gpu-join reads up to {GOES_ON}: "
                "upgrade gpu-join on the driver and its executors"
            )
        # What earlier formats did not have; an unknown key is left alone.
        data = data if version >= _BOUND else {"distribution": SPARK, "generation": 0, **data}
        data = {"join_number": None, **dict.fromkeys(_OPTIONAL), **data}
        fields = {field: _field(name, data, field) for field in _FITS}
        found = cls(json.dumps(fields.pop("join"), sort_keys=True), raw=content.to_pybytes(), **fields)
        if version == 1 and (found.distribution, found.generation) != (SPARK, 0):
            raise _damaged(name, f"format=1 goes with neither {found.distribution=!s} nor {found.generation=!s}")
        return found

    @classmethod
    def of(cls, files: Files) -> Manifest:
        """The manifest of a state folder.

        Raises:
            StateError: it is none, or its manifest is damaged or of a newer format.
        """
        found = cls.read(files)
        if found is None:
            below = ", ".join(_state_folders(files))
            more = f"; there are state folders below it: {below}" if below else ""
            raise StateError(f"{files.location} is no state folder: there is no {files.name(MANIFEST)}{more}")
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
        mine, theirs = (json.loads(from_json(x.description).to_json()) for x in (self, found))
        _same_texts(theirs, mine)
        operators = theirs.get("operators", ()), mine.get("operators", ())
        if operators[0] and not operators[1]:
            raise StateError(
                f"state folder {location} has all {len(operators[0])} operators of its query, in one engine, and this "
                f"is one of them. Give each of them partitions={found.partitions}, as the folder has, or {_ADVICE}"
            )
        difference = next(description_differences(theirs, mine), None)
        if difference is not None:
            raise StateError(
                f"state folder {location} belongs to another join: {difference}. "
                f"Describe the join as it was, or {_ADVICE}"
            )
        if None not in (found.join_number, self.join_number) and found.join_number != self.join_number:
            raise StateError(
                f"state folder {location} belongs to join {found.join_number} of query {found.query_id} (counted from "
                f"its sources), this is join {self.join_number}: two joins have changed folders, or were given the "
                f"same one. Give each join the folder it had, or {_ADVICE}"
            )
        if None not in (found.union_order, self.union_order) and found.union_order != self.union_order:
            raise StateError(
                f"state folder {location}: the inputs stand in another order in Spark's plan than when the query "
                f"began ({found.union_order}, now {self.union_order}), and its checkpoint counts sources by that. What "
                "is below a join is read otherwise, by gpu_ops.read_files() or by Spark: read it as before, or "
                f"{_ADVICE}"
            )
        if found.partitions != self.partitions:
            raise StateError(
                f"state folder {location} is cut into {found.partitions} partitions, the query asks for "
                f"{self.partitions}: go back to {found.partitions}, or stop the query and run "
                f"gpu-join rescale {location} --partitions {self.partitions}"
            )


def _state_folders(files: Files, depth: int = 3) -> Iterator[str]:
    """The state folders below one, as a query of several operators has them."""
    for name in files.folders("") if depth else ():
        below = files.below(name)
        if Manifest.read(below) is not None:
            yield name
        else:
            yield from (f"{name}/{other}" for other in _state_folders(below, depth - 1))


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


def remove_older(files: Files, manifest: Manifest) -> None:
    """Deletes the partitions that a folder had before it was cut anew; those of the manifest have been used by now."""
    files.delete_folder("p")
    for generation in range(1, manifest.generation):
        files.delete_folder(f"g{generation}")


_BOUND: Final = 3
"""From this format on every file says what it belongs to."""

_KEEPS_FILES: Final = 4
"""From this format on a record may name other files."""

_CALLED: Final = {
    "query_id": "query",
    "join": "join",
    "join_number": "its query's join",
    "generation": "generation",
    "partitions": "a cut into so many partitions:",
    "partition": "partition",
}

_MISPLACED: Final = (
    "It was put here from elsewhere: put back what was here, restore the folder from a backup, or start the query "
    "afresh with a new folder and a new checkpoint"
)


def _damaged(name: str, why: str) -> StateError:
    return StateError(f"{name} is damaged: {why}; restore it from a backup, or {_ADVICE}")


def _field(name: str, data: Mapping[str, Any], field: str) -> Any:
    """A field of a manifest, if it is what it can be."""
    if field not in data:
        raise _damaged(name, f"it has no {field!r}")
    if not _FITS[field](data[field]):
        text = repr(data[field])
        raise _damaged(name, f"{field}={text if len(text) <= 200 else f'{text[:200]} ...'}")
    return data[field]


def _whole(least: int) -> Callable[[Any], bool]:
    """Makes a check that a value is a whole number not less than ``least``."""
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_join(value: Any) -> bool:
    try:
        from_json(json.dumps(value))
    except ConditionError as error:
        raise StateError(
            f"the state folder's join has the condition {error.sql!r}, which this version of gpu-join evaluates no "
            f"more: {error.message}. Go on with the version that wrote the folder, or {_ADVICE}"
        ) from error
    except Exception:  # whatever a damaged description leads to: KeyError, ArrowInvalid, binascii.Error ...
        return False
    return True


_FITS: Final[Mapping[str, Callable[[Any], bool]]] = {
    "join": _is_join,
    "partitions": _whole(1),
    "query_id": _is_text,
    "distribution": (SPARK, ARROW).__contains__,
    "generation": _whole(0),
    "format": _whole(1),
    "join_number": lambda value: value is None or _whole(1)(value),
    "union_order": lambda value: value is None or _is_text(value),
    "sealed": lambda value: value is None or _is_text(value),
    "reads_once": (None, True).__contains__,
}
"""The fields of a manifest, and what each can be."""


def _schema(source: dict[str, Any]) -> pa.Schema:
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(source["schema"])))


_DEFAULTS: Final = {"ansi": False}
"""What is meant where a description does not have it: the session of its conditions."""


def _same_texts(was: dict[str, Any], now: dict[str, Any]) -> None:
    """Leaves of conditions their texts, the new one where the trees are the same: how it is written does not matter."""
    for old, new in zip(was.get("operators", ()), now.get("operators", ()), strict=False):
        _same_texts(old["description"], new["description"])
        for projection in (*old.get("projections", ()), *new.get("projections", ())):
            for expression in (x for part in (projection or {}).values() for x in part):
                del expression["text"]
    for old, new in zip([was, *was.get("steps", ())], [now, *now.get("steps", ())], strict=False):
        olds, news = old.get("where"), new.get("where")
        old["where"], new["where"] = olds and olds["text"], news and news["text"]
        if olds and news and olds["tree"] == news["tree"]:
            old["where"] = new["where"]
        elif olds and old["where"] == new["where"]:
            old["where"] += " (which meant something else)"


def description_differences(was: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """Yields the differences between two descriptions of operators, as JSON has them, the most telling first."""
    operators = was.get("operators", ()), now.get("operators", ())
    for old, new in zip(*operators, strict=False):
        yield from (f"{old['name']}: {one}" for one in description_differences(old["description"], new["description"]))
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
        default = _DEFAULTS.get(option)
        if was.get(option, default) != now.get(option, default):
            yield f"it had {option}={was.get(option, default)!r}, now {now.get(option, default)!r}"


def _schema_differences(name: str, was: pa.Schema, now: pa.Schema) -> Iterator[str]:
    before, after = (as_written(", ".join(schema.names), [name]) for schema in (was, now))
    for field in was:
        if field.name not in now.names:
            yield f"input '{name}' had a column {_shown(name, field)} ({field.type}), now it has none"
    for field in now:
        if field.name not in was.names:
            yield (
                f"input '{name}' has a column {_shown(name, field)} ({field.type}) that it had not. Leave new columns "
                f"out, in the DataFrame or in the query: select {before}"
            )
    for field in was:
        other = now.field(field.name) if field.name in now.names else field
        if field.type != other.type:
            yield f"input '{name}': column {_shown(name, field)} was {field.type}, now {other.type}"
        elif field.nullable != other.nullable:
            yield f"input '{name}': column {_shown(name, field)} was nullable={field.nullable}, now {other.nullable}"
    if was.names != now.names:
        yield f"input '{name}': its columns are in another order, {after}: select {before}"
    else:
        yield f"input '{name}': the schema was {was}, now {now}"


def _shown(name: str, field: pa.Field) -> str:
    return repr(as_written(field.name, [name]))
