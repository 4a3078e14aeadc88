"""Recovery of a partition's version from a state folder, the errors where that is impossible, and snapshots."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Final

import pyarrow as pa

from gpu_ops.errors import StateError
from gpu_ops.memory import give_back
from gpu_ops.state.durable import PartitionLog, Stored, Times
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest, check_open, ensure
from gpu_ops.state.pieces import WHOLE_BYTES, Flush, Piece, Pieced, Storable, StoredTable, WrittenTable, most_bytes

_log = logging.getLogger(__name__)

MIN_RECORDS: Final = 16
"""Least number of records before a snapshot."""

REPLAY_SECONDS: Final = 2.0
"""Seconds of micro-batches after which a snapshot is due: replaying them takes about as long."""

WORTH_SECONDS: Final = 0.1
"""Seconds of micro-batches from which on replaying them takes longer than to load a snapshot."""

RECORD_COST: Final = 256 << 10
"""Least bytes that a record counts for: opening and replaying a small one takes as long as reading these."""

_SHOWN: Final = 8
_AT_ONCE: Final = 16

_ANEW: Final = "start the query afresh with a new folder and a new checkpoint"

_WHOLE: Final = (
    "a function given to foreachBatch() has to read each micro-batch, all of it, "
    "not head(), limit() or nothing: what it leaves out, the state never gets"
)


def left_behind(who: str, batch_id: int, done: Collection[int], partitions: int) -> StateError:
    """Makes the error for a micro-batch that Spark calls done and some partitions have not done.

    Args:
        who: the join, for errors.
        batch_id: the micro-batch.
        done: the partitions that have done it.
        partitions: the number of partitions.
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
        manifest: the folder's manifest.
        batch_id: a micro-batch that Spark is done with.

    Raises:
        StateError: names the partitions that have not.
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
        manifest: the manifest that it must have.
        next_batch: returns the next micro-batch by the query's checkpoint, which may run already.

    Raises:
        StateError: says why it does not fit.
    """
    check_open(files)
    stored_manifest = ensure(files, manifest, create=False)
    if stored_manifest is not None:
        stored_manifest.check_cut(files.location)
    try:
        least = next_batch()
    except StateError as error:
        _log.warning("the state folder %s is looked at when rows come: %s", files.location, error)
        return
    who = "join of " + ", ".join(x["name"] for x in json.loads(manifest.description)["inputs"])
    if stored_manifest is None:
        stored_manifest = Manifest.read(files)  # the first micro-batch may have just made it
    versions = [0] if stored_manifest is None else _versions(files, stored_manifest)
    if least and max(versions) == 0:
        raise nothing_stored(who, files.location, least)
    if max(versions) < least:
        raise behind(who, max(versions) - 1, least)
    _check_all_did(files.location, versions, least - 1)
    most = next_batch()
    if max(versions) > most + 1:
        raise ahead(who, max(versions) - 1, most)


def ahead(who: str, last: int, batch_id: int) -> StateError:
    """Makes the error for a state beyond the micro-batch that Spark asks for."""
    return StateError(
        f"{who}: the state folder is at batch {last}, Spark asks for batch {batch_id}: the checkpoint is older than "
        f"the state. Restart from the checkpoint that belongs to this folder, or {_ANEW}"
    )


def behind(who: str, last: int, batch_id: int) -> StateError:
    """Makes the error for a state that lacks micro-batches at its end."""
    return StateError(
        f"{who}: the state folder ends with batch {last}, Spark asks for batch {batch_id}: it is older than the "
        f"checkpoint. Restore the folder that belongs to it, or {_ANEW}. Where it was never there: {_WHOLE}"
    )


def memory_refused(who: str, held: str, batch_id: int) -> StateError:
    """Makes the error for a micro-batch that does not follow a state kept in memory only."""
    return StateError(
        f"{who}: state= was not given, so the state lives in this server's memory only, which holds {held}; "
        f"batch {batch_id} does not follow. A restart is refused instead of answering wrongly: "
        "start the query afresh with a new checkpoint, and give state= to be able to resume. "
        f"Where it was not started again: {_WHOLE}"
    )


def nothing_stored(who: str, where: str, batch_id: int) -> StateError:
    """Makes the error for a micro-batch after the first when there is no state."""
    return StateError(
        f"{who}: nothing is stored in {where}, and Spark asks for batch {batch_id}. The state of the batches "
        "before it is gone, or state= names another folder than it did: give that folder, or "
        f"start the query afresh with a new checkpoint. Where they never were there: {_WHOLE}"
    )


def newest_snapshot(who: str, batch_id: int, log: PartitionLog, stored: Stored) -> int:
    """Finds the newest snapshot (0 for none) from which version ``batch_id`` can be built with the records since.

    Args:
        who: the partition, for errors.
        batch_id: the micro-batch that is to be applied next.
        log: the partition's files.
        stored: the list of these files.

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


def snapshot_due(version: int, partition: int, stored: Stored, every: int | None, seconds: float = 0) -> bool:
    """True if the log has grown twice as large as the last snapshot, its pieces left out, or takes long to replay.

    A snapshot writes the numeric columns of all rows, and of other columns only new rows: so they are rewritten only
    after twice as many bytes of changes.

    Args:
        version: the version that a snapshot would have.
        partition: the partition's number, which keeps partitions from all writing in one micro-batch.
        stored: the partition's files.
        every: the number of records between snapshots, instead of the rule, if given.
        seconds: the seconds that the micro-batches since the last snapshot took.
    """
    last = max(stored.snapshots, default=0)
    sizes = [size for batch, size in stored.records.items() if last <= batch < version]
    if every is not None:
        return len(sizes) >= every
    if seconds > REPLAY_SECONDS * (1 - partition % 8 / 16):
        return True
    if len(sizes) < MIN_RECORDS + partition % MIN_RECORDS:
        return False
    return sum(max(size, RECORD_COST) for size in sizes) >= 2 * stored.snapshots.get(last, 0)


def stored_version(files: Files, manifest: Manifest) -> int:
    """Returns the number of micro-batches that the state holds, 0 for none.

    Raises:
        StateError: the number is not the same in all partitions.
    """
    versions = _versions(files, manifest)
    if len(set(versions)) > 1:
        raise StateError(
            f"state folder {files.location} is in the middle of batch {max(versions) - 1}: not all partitions have "
            "done it. If its query runs, stop it first; if it has stopped, start it again and let it come to an end"
        )
    return versions[0]


def _versions(files: Files, manifest: Manifest) -> list[int]:
    """Counts the micro-batches that each partition holds."""
    return [stored.last() for stored in stored_of(files, manifest)]


def stored_of(files: Files, manifest: Manifest) -> list[Stored]:
    """Lists what each partition holds, in parallel where the store answers slowly."""

    def stored(partition: int) -> Stored:
        return PartitionLog(files, manifest, partition).stored(clean=False)

    if files.local:
        return [stored(partition) for partition in range(manifest.partitions)]
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(stored, range(manifest.partitions)))


def unnamed_pieces(version: int, tables: Mapping[str, pa.Table | StoredTable], stored: Stored) -> frozenset[str]:
    """The pieces that a snapshot does not name, those of it and of earlier ones.

    Servers that are killed too often for two snapshots each would leave them for ever.

    Args:
        version: the snapshot's.
        tables: what it has.
        stored: the partition's files.
    """
    named = {name for table in tables.values() if isinstance(table, StoredTable) for name, _ in table.pieces}
    return frozenset(name for name in stored.pieces.keys() - named if int(name.partition(".")[0]) <= version)


_WRITTEN_AT_ONCE: Final = 1 << 20
"""Most bytes of a snapshot that is written before the micro-batch goes on: starting a thread would take as long."""


@dataclasses.dataclass(frozen=True)
class RecoveredState:
    """A partition's state at one version: tables, clock, times and backlog flag."""

    tables: dict[str, Storable]
    clock_ms: int
    times: Times
    backlog: bool


class Snapshots:
    """Writes the snapshots of one partition, beside its micro-batches.

    Args:
        who: the partition, for messages.
        log: the partition's files.
        stored: the list of these files.
        partition: the partition's number.
        every: the number of records between snapshots; None to follow `snapshot_due`.
        unneeded: as of `unnamed_pieces`, of the snapshot that was loaded.
        tiny: test setting: the smallest pieces.

    Attributes:
        stored: the present list of files.
        seconds: the seconds that the micro-batches since the last snapshot took.
    """

    def __init__(
        self,
        who: str,
        log: PartitionLog,
        stored: Stored,
        partition: int,
        every: int | None,
        *,
        unneeded: frozenset[str] = frozenset(),
        tiny: bool = False,
    ) -> None:
        self._who, self._log, self.stored = who, log, stored
        self._partition, self._every, self._tiny = partition, every, tiny
        self._running: tuple[_Snapshot | None, Future[None]] | None = None
        self._captured: _Snapshot | None = None
        self._not_before, self.seconds, self._bytes, self._last = 0, 0.0, 0, time.monotonic()
        self._unneeded = unneeded

    def capture(self, version: int, held: Callable[[], RecoveredState]) -> None:
        """Has a snapshot, when one is due, for `take` to write once its version is final.

        Args:
            version: the version of the state.
            held: returns the state; called only when a snapshot is due.
        """
        if self._captured is None and self.due(version):
            self._captured = _Snapshot(self._log, version, held(), self.stored.pieces, tiny=self._tiny)

    def take(self, version: int, held: Callable[[], RecoveredState] | None) -> None:
        """Has a snapshot written when one is due; arguments as of `capture`, but None where none can be captured."""
        if held is not None:
            self.capture(version, held)
        snapshot, self._captured = self._captured, None
        if snapshot is None:
            return
        self.seconds = 0.0
        if snapshot.nbytes <= _WRITTEN_AT_ONCE:
            self._install(snapshot, snapshot.write)
        else:
            self._run(snapshot, partial(_write, snapshot))

    def leave(self, version: int, held: Callable[[], RecoveredState]) -> None:
        """Writes a snapshot of the last version if the log takes longer to replay; it is there on return."""
        self.finish()
        if self.seconds > WORTH_SECONDS and version not in self.stored.snapshots:
            snapshot = _Snapshot(self._log, version, held(), self.stored.pieces, tiny=self._tiny)
            self._install(snapshot, snapshot.write)
            self.finish()

    def due(self, version: int) -> bool:
        """True if a snapshot of a version is due; deletes files replaced by one that is written by now."""
        if self._running is not None and self._running[1].done():
            self._take_in(*self._running)
        if self._running is not None or version < self._not_before:
            return False
        return snapshot_due(version, self._partition, self.stored, self._every, self.seconds)

    def metrics(self) -> dict[str, int | float]:
        """The metrics of snapshots: bytes written since the last call, time to replay the log, age of the last one."""
        written, self._bytes = self._bytes, 0
        age = time.monotonic() - self._last
        return {"snapshot_written_bytes": written, "replay_ms": self.seconds * 1e3, "snapshot_age_ms": age * 1e3}

    def finish(self) -> None:
        """Waits until a running snapshot is written and the files that it replaces are deleted; a captured one goes."""
        if self._captured is not None:
            self._captured.give_up()
            self._captured = None
        while self._running is not None:
            self._take_in(*self._running)

    def _run(self, snapshot: _Snapshot | None, work: Callable[[], None]) -> None:
        """Writes a snapshot, or deletes replaced files, in a thread beside the micro-batches."""
        thread = ThreadPoolExecutor(1, thread_name_prefix="snapshot")
        self._running = snapshot, thread.submit(work)
        thread.shutdown(wait=False)

    def _take_in(self, snapshot: _Snapshot | None, done: Future[None]) -> None:
        self._running = None
        if snapshot is not None:
            self._install(snapshot, done.result)
            return
        try:
            done.result()
        except (StateError, OSError) as error:
            _log.warning("%s: files that are no longer needed stay: %s", self._who, error)

    def _install(self, snapshot: _Snapshot, written: Callable[[], None]) -> None:
        try:
            written()
            self.stored.snapshots[snapshot.version] = snapshot.size
            self.stored.pieces.update(snapshot.sizes)
            self._bytes += snapshot.size + sum(snapshot.sizes.values())
            self._last = time.monotonic()
            # Another server may have taken the partition over, and names what this one does not: a piece that no
            # snapshot of this one names any more is deleted with the next one, which it does not come to then.
            unneeded = self.stored.pieces.keys() - snapshot.install()
            gone = unneeded & self._unneeded
            prune = partial(self._log.prune, snapshot.version, self.stored, gone)
            self.stored, self._unneeded = self.stored.since(snapshot.version, gone), frozenset(unneeded)
            if snapshot.nbytes <= _WRITTEN_AT_ONCE:
                prune()
            else:
                self._run(None, prune)
        except (StateError, OSError) as error:
            # The log alone is enough to go on.
            _log.warning("%s: no snapshot of version %d: %s", self._who, snapshot.version, error)
            self._not_before = snapshot.version + MIN_RECORDS
            self._log.try_to_clean()  # of the pieces that it has written, as a disk may be full
        finally:
            snapshot.give_up()


def _write(snapshot: _Snapshot) -> None:
    """Writes a snapshot, then returns freed memory to the system."""
    snapshot.write()
    give_back()


def write_snapshot(log: PartitionLog, version: int, held: RecoveredState, origins: Mapping[str, PartitionLog]) -> None:
    """Writes the state of a partition into a folder that has nothing of it.

    Args:
        log: the partition's files.
        version: the snapshot's.
        held: the state.
        origins: by table, where its pieces are.

    Raises:
        StateError: it cannot be written, or a piece cannot be read.
    """
    tables = {name: table for name, table in held.tables.items() if not isinstance(table, pa.Table)}
    before, copied = {name: table.pieces for name, table in tables.items()}, set[str]()
    for name, table in tables.items():
        pieces = []
        for piece in table.pieces if table.nbytes > WHOLE_BYTES else ():
            assert piece.name is not None
            own, _ = log.write_piece(version, name, origins[name].read_piece(piece.name))
            pieces.append(dataclasses.replace(piece, name=own))
            copied.add(own)
        table.pieces = tuple(pieces)
    snapshot = _Snapshot(log, version, held, copied, tiny=False)
    try:
        snapshot.write()
    finally:
        snapshot.give_up()
        for name, table in tables.items():
            table.pieces = before[name]


class _Snapshot:
    """A snapshot that is being written.

    Args:
        log: the partition's files.
        version: the snapshot's version.
        held: the state; it is captured here, and may change afterwards.
        existing: the names of the existing pieces.
        tiny: test setting: the smallest pieces.

    Attributes:
        nbytes: the approximate number of bytes to write.
        size: the size of the file, once it is written.
        sizes: the sizes of new pieces, by name.
    """

    def __init__(
        self, log: PartitionLog, version: int, held: RecoveredState, existing: Collection[str], *, tiny: bool
    ) -> None:
        self._log, self.version, self._held = log, version, held
        least = 0 if tiny else WHOLE_BYTES
        self._whole: dict[str, pa.Table] = {}
        self._flushes: dict[str, Flush] = {}
        self._flushed: dict[str, tuple[Pieced, tuple[Piece, ...], int]] = {}
        self._written: dict[str, WrittenTable] = {}
        self.size, self.sizes = 0, dict[str, int]()
        for name, table in held.tables.items():
            if isinstance(table, pa.Table):
                self._whole[name] = table
                continue
            # another server may have deleted what this one had named
            if table.nbytes <= least or any(piece.name not in existing for piece in table.pieces):
                table.pieces = ()
            if table.nbytes <= least:
                self._whole[name] = table.snapshot()
            else:
                most = 1 << 10 if tiny else most_bytes(table.nbytes)
                self._flushes[name] = table.flush()
                self._flushed[name] = table, self._flushes[name].pieces, most
        self.nbytes = sum(table.nbytes for table in self._whole.values())
        self.nbytes += sum(flush.nbytes for flush in self._flushes.values())

    def write(self) -> None:
        """Writes new pieces, then the snapshot that names them, and keeps only their names in memory."""
        with self._log.writing() as held_still:
            if not held_still:
                raise StateError(f"leftovers are being removed from {self._log.name}")
            for name, (_, _, most) in self._flushed.items():
                self._written[name], sizes = self._log.write_pieces(self.version, name, self._flushes.pop(name), most)
                self.sizes |= sizes
            held, tables = self._held, self._whole | self._written
            self.size = self._log.write_snapshot(self.version, tables, held.clock_ms, held.times, backlog=held.backlog)
        self._whole.clear()
        nothing = pa.table({})
        self._written = {name: written._replace(numbers=nothing) for name, written in self._written.items()}

    def install(self) -> set[str]:
        """Assigns the written pieces to the tables, and returns the names of all pieces of the snapshot."""
        for name, (table, pieces, _) in self._flushed.items():
            table.pieces = self._written[name].installed(pieces, table.pieces)
        return {name for written in self._written.values() for name, _ in written.pieces}

    def give_up(self) -> None:
        """Takes pieces that were not written off the tables."""
        for table, _, _ in self._flushed.values():
            table.pieces = tuple(piece for piece in table.pieces if piece.name is not None)
