"""From what a state folder holds to a version of a partition: what is needed, and when it is refused."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final

import pyarrow as pa

from gpu_ops.errors import StateError
from gpu_ops.state.durable import PartitionLog, Stored, Times
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest, check_open, ensure

_log = logging.getLogger(__name__)

MIN_RECORDS: Final = 16
"""No snapshot before this many records."""

RECORD_COST: Final = 256 << 10
"""Bytes a record counts for at least: to open and replay a small one takes as long as to read these."""

_SHOWN: Final = 8
_AT_ONCE: Final = 16

_ANEW: Final = "start the query afresh with a new folder and a new checkpoint"

_WHOLE: Final = (
    "a function given to foreachBatch() has to read each micro-batch, all of it, "
    "not head(), limit() or nothing: what it leaves out, the state never gets"
)


def left_behind(who: str, batch_id: int, done: Collection[int], partitions: int) -> StateError:
    """The error for a micro-batch that Spark calls done and some partitions have not done.

    Args:
        who: the join, for errors.
        batch_id: the micro-batch.
        done: the partitions that have done it.
        partitions: how many there are.
    """
    missing = [str(number) for number in range(partitions) if number not in done]
    shown = ", ".join(missing[:_SHOWN]) + (f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "")
    which = f"partition{'s' if len(missing) > 1 else ''} {shown} of {partitions} never"
    return StateError(
        f"{who}: Spark is done with micro-batch {batch_id}, but {which} computed it, so the state lacks its changes: "
        f"{_WHOLE}. Write the whole DataFrame, or persist() and count() it before you look at a part; then {_ANEW}"
    )


def check_all_did(files: Files, manifest: Manifest, batch_id: int) -> None:
    """Refuses a state folder in which some partitions have done a micro-batch and some have not.

    Args:
        files: the folder.
        manifest: its manifest.
        batch_id: a micro-batch that Spark is done with.

    Raises:
        StateError: which have not.
    """
    _check_all_did(files.location, _versions(files, manifest), batch_id)


def _check_all_did(location: str, versions: Sequence[int], batch_id: int) -> None:
    done = {partition for partition, version in enumerate(versions) if version > batch_id}
    if 0 < len(done) < len(versions):
        raise left_behind(f"state folder {location}", batch_id, done, len(versions))


def check_stored(files: Files, manifest: Manifest, next_batch: Callable[[], int]) -> None:
    """Refuses a state folder that does not fit the query that has just been started with it.

    Args:
        files: the folder.
        manifest: what it must belong to.
        next_batch: asks which micro-batch is the next by the query's checkpoint; it may run already.

    Raises:
        StateError: why.
    """
    check_open(files)
    found = ensure(files, manifest, create=False)
    if found is not None:
        found.check_cut(files.location)
    try:
        least = next_batch()
    except StateError as error:
        _log.warning("the state folder %s is looked at when rows come: %s", files.location, error)
        return
    who = "join of " + ", ".join(x["name"] for x in json.loads(manifest.description)["inputs"])
    if found is None:
        found = Manifest.read(files)  # the first micro-batch may have just made it
    versions = [0] if found is None else _versions(files, found)
    if least and max(versions) == 0:
        raise nothing_stored(who, files.location, least)
    if max(versions) < least:
        raise behind(who, max(versions) - 1, least)
    _check_all_did(files.location, versions, least - 1)
    most = next_batch()
    if max(versions) > most + 1:
        raise ahead(who, max(versions) - 1, most)


def ahead(who: str, last: int, batch_id: int) -> StateError:
    """The error for a state that is beyond the micro-batch that is asked for."""
    return StateError(
        f"{who}: the state folder is at batch {last}, Spark asks for batch {batch_id}: the checkpoint is older than "
        f"the state. Restart from the checkpoint that belongs to this folder, or {_ANEW}"
    )


def behind(who: str, last: int, batch_id: int) -> StateError:
    """The error for a state that lacks micro-batches at its end."""
    return StateError(
        f"{who}: the state folder ends with batch {last}, Spark asks for batch {batch_id}: it is older than the "
        f"checkpoint. Restore the folder that belongs to it, or {_ANEW}. Where it was never there: {_WHOLE}"
    )


def memory_refused(who: str, held: str, batch_id: int) -> StateError:
    """The error for a micro-batch that does not follow a state kept in memory only."""
    return StateError(
        f"{who}: state= was not given, so the state lives in this server's memory only, which holds {held}; "
        f"batch {batch_id} does not follow. A restart is refused instead of answering wrongly: "
        "start the query afresh with a new checkpoint, and give state= to be able to resume. "
        f"Where it was not started again: {_WHOLE}"
    )


def nothing_stored(who: str, where: str, batch_id: int) -> StateError:
    """The error for a micro-batch after the first when there is no state."""
    return StateError(
        f"{who}: nothing is stored in {where}, and Spark asks for batch {batch_id}. The state of the batches "
        "before it is gone, or state= names another folder than it did: give that folder, or "
        f"start the query afresh with a new checkpoint. Where they never were there: {_WHOLE}"
    )


def newest_snapshot(who: str, batch_id: int, log: PartitionLog, stored: Stored) -> int:
    """The snapshot (0 for none) from which version ``batch_id`` can be built; all records since are there.

    Args:
        who: the partition, for errors.
        batch_id: the micro-batch that is to be applied next.
        log: the partition's files.
        stored: what they are.

    Raises:
        StateError: the folder is ahead, behind, empty or has a gap.
    """
    last = max([*stored.records, *(version - 1 for version in stored.snapshots)], default=-1)
    if last > batch_id:
        raise ahead(who, last, batch_id)
    if last < 0 and batch_id > 0:
        raise nothing_stored(who, log.name, batch_id)
    base = max((version for version in stored.snapshots if version <= batch_id), default=0)
    missing = next((b for b in range(base, batch_id) if b not in stored.records), None)
    if missing is None:
        return base
    if missing > last:
        raise behind(who, last, batch_id)
    raise StateError(
        f"{who}: {log.record_name(missing)} is missing, Spark asks for batch {batch_id}. Restore the state folder from "
        f"a backup, or {_ANEW}"
    )


def snapshot_due(version: int, partition: int, stored: Stored, every: int | None) -> bool:
    """Whether the log has grown as large as the last snapshot.

    So each stored byte of state is written again only after as many bytes of changes.

    Args:
        version: of which a snapshot would be.
        partition: partitions grow alike; their numbers keep them from all writing in one micro-batch.
        stored: what there is.
        every: this many records instead, if given.
    """
    last = max(stored.snapshots, default=0)
    sizes = [size for batch, size in stored.records.items() if last <= batch < version]
    if every is not None:
        return len(sizes) >= every
    if len(sizes) < MIN_RECORDS + partition % MIN_RECORDS:
        return False
    return sum(max(size, RECORD_COST) for size in sizes) >= stored.snapshots.get(last, 0)


def stored_version(files: Files, manifest: Manifest) -> int:
    """How many micro-batches the state holds, 0 for none.

    Raises:
        StateError: not the same number in all partitions.
    """
    versions = _versions(files, manifest)
    if len(set(versions)) > 1:
        raise StateError(
            f"state folder {files.location} is in the middle of batch {max(versions) - 1}: not all partitions have "
            "done it. If its query runs, stop it first; if it has stopped, start it again and let it come to an end"
        )
    return versions[0]


def _versions(files: Files, manifest: Manifest) -> list[int]:
    """How many micro-batches each partition holds; object stores answer slowly, so several are asked for at a time."""

    def version(partition: int) -> int:
        stored = PartitionLog(files, manifest, partition).stored(clean=False)
        return max([0, *(batch + 1 for batch in stored.records), *stored.snapshots])

    if files.local:
        return [version(partition) for partition in range(manifest.partitions)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(version, range(manifest.partitions)))


_WRITTEN_AT_ONCE: Final = 1 << 20
"""Bytes, at most, that are written before the micro-batch goes on: a thread would take as long."""


@dataclasses.dataclass(frozen=True)
class Held:
    """The state of a version, as a snapshot has it."""

    tables: dict[str, pa.Table]
    clock_ms: int
    times: Times
    backlog: bool


class Snapshots:
    """Those of one partition, for its owner.

    Args:
        who: the partition, for messages.
        log: its files.
        stored: what they are.
        partition: its number.
        every: so many records apart; None for when the log has grown as large as the last one.

    Attributes:
        stored: what the files are now.
    """

    def __init__(self, who: str, log: PartitionLog, stored: Stored, partition: int, every: int | None) -> None:
        self._who, self._log, self.stored = who, log, stored
        self._partition, self._every = partition, every
        self._writing: tuple[int, Future[int]] | None = None
        self._not_before = 0

    def take(self, version: int, held: Callable[[], Held]) -> None:
        """Have a snapshot written when one is due; delete what one replaces that is written by now.

        Args:
            version: that the state is at.
            held: copies the state; called only when a snapshot is due.
        """
        if self._writing is not None and not self._writing[1].done():
            return
        self.finish()
        if version < self._not_before:
            return
        if not snapshot_due(version, self._partition, self.stored, self._every):
            return
        state = held()
        write = functools.partial(
            self._log.write_snapshot, version, state.tables, state.clock_ms, state.times, backlog=state.backlog
        )
        if sum(table.nbytes for table in state.tables.values()) <= _WRITTEN_AT_ONCE:
            self._settle(version, write)
        else:
            thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
            self._writing = version, thread.submit(write)
            thread.shutdown(wait=False)

    def finish(self) -> None:
        """Wait for what is being written, and delete what it replaces."""
        if self._writing is not None:
            version, writing = self._writing
            self._settle(version, writing.result)

    def _settle(self, version: int, written: Callable[[], int]) -> None:
        self._writing = None
        try:
            self.stored.snapshots[version] = written()
            self.stored = self._log.prune(version, self.stored)
        except (StateError, OSError) as error:
            # The log alone is enough to go on.
            _log.warning("%s: no snapshot of version %d: %s", self._who, version, error)
            self._not_before = version + MIN_RECORDS
