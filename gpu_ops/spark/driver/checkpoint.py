"""Where the sources of a stopped query stand, from its checkpoint, and a new checkpoint made of parts of others.

A checkpoint of Spark's has, for each micro-batch, ``offsets/<n>``, written before it: a format, a line of metadata and
the offset of each source; and ``commits/<n>``, written after it. What a source keeps besides lies in
``sources/<number>``, and ``metadata`` has the query's id.

The format is that of Spark 3.5 to 4.3 (`OffsetSeqLog`, `CommitLog`, `StreamMetadata`; `MicroBatchExecution` for what a
restart reads). With format ``v1`` offsets are in the order of the sources, with ``v2`` each has its source's name or
number. Hadoop reads the files, and Spark's own `CheckpointFileManager` writes each of them at once or not at all.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pyspark.sql import SparkSession

from gpu_ops.errors import StateError
from gpu_ops.spark.driver.hadoop_files import HadoopFiles
from gpu_ops.spark.driver.stream_sources import StreamSource, unknown_sources

_NOTHING: Final = "-"
"""Stands for the offset of a source that has given nothing yet."""

_OFFSETS, _COMMITS, _METADATA, _SOURCES, _STATE = "offsets", "commits", "metadata", "sources", "state"
_OF_OPERATORS: Final = "stateUniqueIds"
"""Member of a commit: the files of the state of Spark's own operators."""
_OF_SOURCES: Final = "sourceMetadataInfo"
"""Member of the metadata of format ``v2``, which Spark declares and writes empty."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The offsets of a stopped query's sources behind its last micro-batch, which is committed.

    Attributes:
        location: the folder, as Hadoop writes it.
        query_id: Spark's id of the query.
        version: how many micro-batches the query has committed, which is the number of its next one.
        offsets: the offset of each source, as Spark wrote it; None for one that has given nothing yet.
        folders: for each source the name of its folder below ``sources``.
        metadata: the line beside the offsets: watermark, time, settings of the session; may be empty.
        layout: how the offsets are written: ``v1`` or ``v2``.
        commit: the text of the last commit: the watermark of the next micro-batch.
    """

    location: str
    query_id: str
    version: int
    offsets: tuple[str | None, ...]
    folders: tuple[str, ...]
    metadata: str
    layout: str
    commit: str

    @classmethod
    def read(cls, session: SparkSession, location: str, sources: Sequence[StreamSource] | None = None) -> Checkpoint:
        """Reads the checkpoint of a query that does not run.

        Args:
            session: a session.
            location: the query's ``checkpointLocation``.
            sources: the sources of that query; None if they are not known, and each offset is of a source of its own.

        Raises:
            StateError: there is no checkpoint, its last micro-batch is not committed, it has state of Spark's own
                operators, other sources, or a format that is not known.
        """
        files = HadoopFiles(session, location)
        if not files.exists(_METADATA):
            raise StateError(
                f"there is no checkpoint of a query in {files.location}: give the checkpointLocation that it ran with"
            )
        query_id = _query_id(files)
        which = f"the checkpoint {files.location} of query {query_id}"
        begun, committed = files.latest(_OFFSETS), files.latest(_COMMITS)
        if begun is None and committed is None:
            raise StateError(f"{which} has no micro-batch yet: there is nothing to go on from, begin with a new one")
        if begun is None or (committed is not None and committed > begun):
            raise StateError(f"{which} is damaged: micro-batch {committed} is committed and its offsets are not there")
        if committed != begun:
            raise StateError(
                f"{which} has begun micro-batch {begun} and not committed it: start the query once more as it was and "
                "let it finish, with trigger(availableNow=True), then stop it"
            )
        commit = files.text(f"{_COMMITS}/{committed}")
        if files.names(_STATE) or _members(commit.partition("\n")[2], which).get(_OF_OPERATORS):
            raise StateError(
                f"{which} has state of Spark's own operators (groupBy, dropDuplicates, a join of Spark's and such), "
                "which does not go along: begin anew, with another checkpoint and state"
            )
        known = sources is not None
        layout, metadata, offsets, sources = _parsed(files.text(f"{_OFFSETS}/{begun}"), sources, which)
        folders = tuple(source.folder for source in sources)
        present = set(files.names(_SOURCES))
        if layout == "v1" and (others := present - set(folders)):
            raise StateError(
                f"{which} has a source {min(others)!r}, and the query that it is said to be of has none of that name: "
                "give the checkpoint of that query"
            )
        if not known and len(present) < len(offsets) > len(set(offsets)):
            raise StateError(f"{which} has two equal offsets, which may be of one source: its sources have to be known")
        return cls(files.location, query_id, begun + 1, offsets, folders, metadata, layout, commit)

    def text_of(self, session: SparkSession, name: str) -> str | None:
        """The text of a further file that the checkpoint has, or None."""
        files = HadoopFiles(session, self.location)
        return files.text(name) if files.exists(name) else None


def begin_checkpoint(session: SparkSession, to: str, query_id: str) -> str:
    """Gives a query that has not begun yet an id, unless it has one.

    Args:
        session: a session.
        to: the folder of its checkpoint.
        query_id: the id.

    Returns:
        The id that it has.
    """
    files = HadoopFiles(session, to)
    if not files.exists(_METADATA):
        _put_id(files, query_id)
    if files.latest(_OFFSETS) is None:
        files.delete(_OFFSETS)  # a kill may have left a file there half written, and Spark begins in an empty folder
    return _query_id(files)


def write_checkpoint(
    session: SparkSession,
    to: str,
    query_id: str,
    batch: int,
    parts: Sequence[tuple[Checkpoint, int]],
    *,
    build: Checkpoint,
    sources: Sequence[StreamSource] | None = None,
    beside: Mapping[str, str] | None = None,
) -> None:
    """Writes the checkpoint of a query whose sources go on where sources of other queries stand.

    The query that starts with it has micro-batch ``batch + 1`` next. The query's id is written last: one that is
    started before that gets another id, by which its state folder refuses it. Called again after it was killed, it adds
    what is missing; called again when all is written, it does nothing, also if the query has gone on since.

    Args:
        session: a session.
        to: the folder to write, empty or not there yet.
        query_id: the query's id.
        batch: the number of the query's last micro-batch, which is committed.
        parts: for each source of the query, in their order, the checkpoint in which one like it stands, and the number
            of the source there.
        build: the checkpoint that has the metadata and the watermark of that micro-batch.
        sources: the query's sources; None where none is twice in its plan and none has a name.
        beside: further files, names and texts.

    Raises:
        StateError: the folder has something else, or the sources are not as many as the parts.
        NotBuiltError: this version of Spark has other classes for checkpoints.
    """
    files = HadoopFiles(session, to)
    sources = unknown_sources(list(map(str, range(len(parts))))) if sources is None else sources
    if len(sources) != len(parts):
        raise StateError(f"the query has {len(sources)} sources, and its checkpoint is to be made of {len(parts)}")
    offsets = _text(sources, [checkpoint.offsets[number] for checkpoint, number in parts], build)
    if files.exists(_METADATA):
        _check_written(files, query_id, batch, offsets)
        return
    _check_unused(files, batch)
    for source, (checkpoint, number) in zip(sources, parts, strict=True):
        other = HadoopFiles(session, checkpoint.location)
        files.copy(other, f"{_SOURCES}/{checkpoint.folders[number]}", f"{_SOURCES}/{source.folder}")
    for name, text in (beside or {}).items():
        files.put(name, text)
    # A restart reads the offsets of the last two micro-batches, and asks some sources for the rows between them: none.
    for number in range(max(batch - 1, 0), batch + 1):
        files.put(f"{_OFFSETS}/{number}", offsets)
    files.put(f"{_COMMITS}/{batch}", build.commit)
    _put_id(files, query_id)


def _put_id(files: HadoopFiles, query_id: str) -> None:
    files.put(_METADATA, json.dumps({"id": query_id}, separators=(",", ":")))


def _query_id(files: HadoopFiles) -> str:
    text = files.text(_METADATA)
    query_id = _members(text, f"the checkpoint {files.location}").get("id")
    if not isinstance(query_id, str):
        raise StateError(f"the checkpoint {files.location} is damaged: it names no query: {text[:100]!r}")
    return query_id


def _members(text: str, which: str) -> Mapping[str, Any]:
    """The members of a line of JSON; none of an empty one."""
    try:
        value = json.loads(text or "{}")
    except ValueError as error:
        raise StateError(f"{which} is damaged: {text[:100]!r} is no JSON") from error
    return value if isinstance(value, dict) else {}


def _parsed(
    text: str, sources: Sequence[StreamSource] | None, which: str
) -> tuple[str, str, tuple[str | None, ...], Sequence[StreamSource]]:
    """The layout of a file of offsets, its metadata, the offset of each source, and the sources."""
    layout, *rest = text.split("\n")
    if layout not in ("v1", "v2"):
        raise StateError(
            f"{which} has offsets in the layout {layout[:20]!r}, of which this version of gpu-join does not know how "
            "to go on: begin anew, with another checkpoint and state"
        )
    if not rest:
        raise StateError(f"{which} is damaged: a file of offsets ends after {layout!r}")
    metadata, *lines = rest
    if layout == "v2":
        if _members(metadata, which).get(_OF_SOURCES):
            raise StateError(f"{which} has {_OF_SOURCES}, which this version of gpu-join does not know")
        pairs = [line.partition(":")[::2] for line in lines]
    else:
        pairs = [(str(place), line) for place, line in enumerate(lines)]
    by_key = {key: None if offset == _NOTHING else offset for key, offset in pairs}
    if sources is None:
        sources = unknown_sources(sorted(by_key, key=lambda key: (int(key) if key.isdigit() else -1, key)))
    keys = [_keys(source, layout) for source in sources]
    known = {key for one in keys for key in one}
    if (
        by_key.keys() - known
        or not all(by_key.keys() & one for one in keys)
        or (layout == "v1" and known - by_key.keys())
    ):
        raise StateError(
            f"{which} has the offsets of sources {', '.join(by_key)}, and the query that it is said to be of has "
            f"{', '.join(sorted(known))}: give the checkpoint of that query"
        )
    return layout, metadata, tuple(next(by_key[key] for key in one if key in by_key) for one in keys), sources


def _keys(source: StreamSource, layout: str) -> list[str]:
    """The keys of a source's offset: in layout ``v2`` its name, if it has one; else its places, of which one may do."""
    return [source.name] if layout == "v2" and source.name is not None else list(map(str, source.places))


def _text(sources: Sequence[StreamSource], offsets: Sequence[str | None], build: Checkpoint) -> str:
    """The text of a file of offsets, in the layout and with the metadata of another one."""
    by_source = zip(sources, (_NOTHING if offset is None else offset for offset in offsets), strict=True)
    if build.layout == "v2":
        lines = [f"{key}:{offset}" for source, offset in by_source for key in _keys(source, build.layout)]
    else:
        by_place = {place: offset for source, offset in by_source for place in source.places}
        lines = [by_place[place] for place in range(len(by_place))]
    return "\n".join([build.layout, build.metadata, *lines])


def _check_written(files: HadoopFiles, query_id: str, batch: int, offsets: str) -> None:
    """Refuses a checkpoint that is whole already, if it is not the one that is to be written."""
    present = _query_id(files)
    if present != query_id:
        raise StateError(
            f"{files.location} has the checkpoint of another query, {present}: give a checkpoint folder that is empty"
        )
    if files.exists(f"{_OFFSETS}/{batch}") and files.text(f"{_OFFSETS}/{batch}") != offsets:
        raise StateError(
            f"{files.location} has been written for query {query_id} with other offsets of micro-batch {batch}: give a "
            "checkpoint folder that is empty"
        )


def _check_unused(files: HadoopFiles, batch: int) -> None:
    """Refuses a folder that has micro-batches of another query."""
    others = [f"{_OFFSETS}/{n}" for n in files.numbers(_OFFSETS) if n not in (batch - 1, batch)]
    others += [f"{_COMMITS}/{n}" for n in files.numbers(_COMMITS) if n != batch]
    others += [f"{_STATE}/{name}" for name in files.names(_STATE)]
    if others:
        raise StateError(
            f"{files.location} has a checkpoint of another query, {others[0]}: give a checkpoint folder that is empty"
        )
