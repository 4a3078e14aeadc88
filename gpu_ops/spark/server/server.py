"""The state server: a process that owns the state of some partitions, speaking Arrow Flight.

``python -m gpu_ops.spark.server.server`` reads one line of JSON from its standard input, ``{"token": ...}``,
writes one to its standard output, ``{"port": n, "pid": n}``, logs to standard error, and ends when its
standard input does or its parent process is gone.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import errno
import importlib
import itertools
import json
import logging
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple, get_args

import pyarrow as pa
from pyarrow import flight

from gpu_ops.backends import gpu_available, lost_gpu
from gpu_ops.errors import BadInputError, DescriptionError, StateError, out_of_memory
from gpu_ops.kernels import Probe
from gpu_ops.memory import Budget, disk_size, give_back, memory_size
from gpu_ops.spark.server.files_read import read_anew
from gpu_ops.spark.server.partition import AbandonedError, Applied, PartitionState
from gpu_ops.spark.settings import LOST_GPU, MEMORY_GPU, MEMORY_HOST
from gpu_ops.spark.wire.command import ApplyCommand, read
from gpu_ops.spark.wire.connection import FlightServer, Handler
from gpu_ops.spark.wire.files_request import FilesRequest
from gpu_ops.state import files
from gpu_ops.state.blocks import KEPT, FilePart, Mapped, checked, leave
from gpu_ops.state.files import READING, Activity
from gpu_ops.values import check_array

_log = logging.getLogger(__name__)

ROWS_PER_MESSAGE: Final = 1 << 16
"""Most rows of a record batch of the answer."""

_POLL_S: Final = 1.0
_IDLE_S: Final = 2.0


def host_memory() -> int:
    """The bytes of the machine's memory, used or not."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


_MOST_BYTES: Final = host_memory()


class StateServer(FlightServer):
    """The state server, which answers the calls of Spark tasks; those for different partitions run at the same time.

    Args:
        token: the secret that every call must bring.
        backend: the backend for commands that say ``"auto"``.
        host: the address to listen on.
        port: the port to listen on; 0 for any.
        budget: the memory budget of all partitions together.
        probe: the way in which a GPU finds matching rows, see `gpu_ops.kernels.Probe`.
        certificate: files with the certificate chain and its key; without them connections are plain.
        name: the server's name in errors.
        blocks: the folder in which callers leave rows and take answers, if they are on this machine.
    """

    def __init__(
        self,
        token: str,
        *,
        backend: str = "auto",
        host: str = "127.0.0.1",
        port: int = 0,
        budget: Budget | None = None,
        probe: Probe = "auto",
        certificate: tuple[str, str] | None = None,
        name: str = "",
        blocks: str | None = None,
    ) -> None:
        self._blocks = blocks
        self._backend, self._budget, self._probe, self._name = backend, budget, probe, name
        self._lock = threading.Lock()
        self._partitions: dict[tuple[str, str, int], PartitionState] = {}
        self._calls: dict[str, Activity] = {}
        self._running = 0
        self._last_call = time.monotonic()
        self._trimmed = True
        self.stopping = threading.Event()
        actions: dict[str, Handler] = {
            "ping": lambda request, _: self._ping(request),
            "release": lambda request, _: self._release(request),
            "metrics": lambda *_: self._status(),
            "shutdown": lambda *_: self._stop(),
        }
        super().__init__(token, host=host, port=port, certificate=certificate, actions=actions)

    # --- Flight ------------------------------------------------------------------------------

    def do_exchange(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Applies one micro-batch to one partition; see `ApplyCommand`."""
        with self.errors_as_status("apply"):
            command = ApplyCommand.parse(descriptor.command or b"")
            if command.backend == "auto" and self._backend != "auto":
                command = ApplyCommand(**{**vars(command), "backend": self._backend})
            answers = None if command.answers is None else checked(command.answers, self._blocks, file=False)
            partition = self._partition(command)
            receiving = Activity()
            if command.ahead:
                self._prepare_ahead(command, partition, reader, writer)
                return
            with self._turn(command, partition):
                answer = self._answer(command, partition, context, reader, receiving)
            with self._asked_after(command.call, receiving):
                receiving.begin("sending the answer")
                _send(writer, answer, command, answers)

    def _prepare_ahead(
        self,
        command: ApplyCommand,
        partition: PartitionState,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.MetadataRecordBatchWriter,
    ) -> None:
        """Receives the rows of what is probably the next micro-batch, and has it prepared."""
        receiving = Activity()
        with self._asked_after(command.call, partition.activity):
            done = partition.may_prepare_ahead(command.batch_id)
        if not done:  # and nothing is looked at
            for _ in reader:
                receiving.move()
        else:
            with self._asked_after(command.call, receiving), self._out_of_memory(partition, command.batch_id):
                arrived = _receive(reader, command, partition, receiving, Mapped(self._blocks))
            with self._asked_after(command.call, partition.activity), self._out_of_memory(partition, command.batch_id):
                done = partition.prepare_ahead(command.batch_id, arrived.table, command.wire, arrived.parts)
        writer.begin(pa.schema([]))
        writer.write_metadata(json.dumps({"prepared": done}).encode())

    @contextlib.contextmanager
    def _turn(self, command: ApplyCommand, partition: PartitionState) -> Iterator[None]:
        """Context manager in which one of a partition's tasks is at a time: the others find the answer that it gets."""
        if command.shares == 1:
            yield
            return
        with self._asked_after(command.call, partition.activity):  # while another call has it
            partition.turn.acquire()
        try:
            yield
        finally:
            partition.turn.release()

    def _answer(
        self,
        command: ApplyCommand,
        partition: PartitionState,
        context: flight.ServerCallContext,
        reader: flight.MetadataRecordBatchReader,
        receiving: Activity,
    ) -> Applied:
        """Receives the rows of a micro-batch and applies them; of several tasks with the same rows the first one's."""
        kept = partition.kept(command.batch_id, command.rows, command.shared_in) if command.shares > 1 else None
        if kept is not None:
            with self._asked_after(command.call, receiving):
                for _ in reader:
                    receiving.move()
            return kept
        with self._asked_after(command.call, receiving), self._out_of_memory(partition, command.batch_id):
            try:
                arrived = _receive(reader, command, partition, receiving, Mapped(self._blocks))
            except MemoryError:
                raise
            except (pa.ArrowException, flight.FlightError, OSError, UnicodeError) as error:  # names may be no UTF-8
                raise AbandonedError(f"the rows of batch {command.batch_id} broke off: {error}") from error
        # also while another call has the partition
        with self._asked_after(command.call, partition.activity), self._out_of_memory(partition, command.batch_id):
            return partition.apply(
                command.batch_id,
                arrived.table,
                command.wire,
                alive=lambda: not context.is_cancelled(),
                watermark=command.watermark,
                clock_ms=command.clock_ms,
                backlog=command.backlog,
                shared_in=command.shared_in,
                parts=arrived.parts,
                files=None if command.files is None else read(FilesRequest, command.files),
            )

    # --- partitions --------------------------------------------------------------------------

    def _partition(self, command: ApplyCommand) -> PartitionState:
        key = command.join_id, command.query_id, command.partition
        with self._lock:
            held = self._partitions.get(key)
            if held is not None and held.serves(command):
                return held
            opened = self._partitions[key] = PartitionState(command, budget=self._budget, probe=self._probe)
        if held is not None:
            _log.info("%s: another description; what was held is dropped", held)
            held.close()
        return opened

    def _release(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if "join_id" not in request:
            raise DescriptionError('release takes {"join_id": ...}')
        with self._lock:
            keys = [key for key in self._partitions if key[0] == request["join_id"]]
            dropped = [self._partitions.pop(key) for key in keys]
        for partition in dropped:
            partition.close(request.get("version"))
        return {"released": len(dropped)}

    def _ping(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Answers that the server lives, and what the exchange ``{"call": name}`` does; None if there is no such."""
        end_without_gpu()
        with self._lock:
            held = list(self._partitions.values())
        used = {p.backend for p in held if p.backend is not None}
        answer = {"pid": os.getpid(), "backend": min(used, default=self._backend), "partitions": len(held)}
        if "call" not in request:
            return answer
        call = self._calls.get(str(request["call"]))
        return {**answer, "call": None if call is None else call.tell()}

    def _stop(self) -> dict[str, Any]:
        _log.info("asked to stop")
        self.stopping.set()
        return {}

    def _status(self) -> dict[str, Any]:
        with self._lock:
            held = list(self._partitions.items())
        return {
            "pid": os.getpid(),
            "partitions": [{"join_id": key[0], "query_id": key[1], **partition.status()} for key, partition in held],
            "calls": [activity.tell() for activity in list(self._calls.values())],
        }

    # --- housekeeping ------------------------------------------------------------------------

    @contextlib.contextmanager
    def _asked_after(self, call: str | None, activity: Activity) -> Iterator[None]:
        """Context manager during which a ping that names the call is answered with this activity."""
        if call is None:
            yield
            return
        self._calls[call] = activity
        try:
            yield
        finally:
            self._calls.pop(call, None)

    @contextlib.contextmanager
    def _out_of_memory(self, partition: PartitionState, batch_id: int) -> Iterator[None]:
        """Context manager that turns an error for lack of memory into one that says what helps."""
        try:
            yield
        except Exception as error:
            if not (out_of_memory(error) or (isinstance(error, OSError) and error.errno == errno.ENOMEM)):
                raise
            setting = MEMORY_GPU if partition.backend == "gpu" else MEMORY_HOST
            raise StateError(
                f"state server {self._name or os.getpid()} has too little memory for micro-batch {batch_id} of the "
                f"{partition}: {error!r}. Make more partitions or smaller micro-batches (maxFilesPerTrigger, "
                "maxOffsetsPerTrigger), or give servers more room: on a cluster spark.executor.memoryOverhead; "
                f"{setting} says how much the state of each may take"
            ) from error

    @contextlib.contextmanager
    def errors_as_status(self, what: str) -> Iterator[None]:
        """Turns errors into statuses as the base class does, and notes that the server is not idle."""
        with self._lock:
            self._running += 1
        try:
            with super().errors_as_status(what):
                yield
        except flight.FlightError:
            end_without_gpu()
            raise
        finally:
            with self._lock:
                self._running -= 1
                self._last_call, self._trimmed = time.monotonic(), False

    def trim(self) -> None:
        """Returns unused memory to the system when the server has been idle for a while."""
        with self._lock:
            if self._trimmed or self._running or time.monotonic() - self._last_call < _IDLE_S:
                return
            self._trimmed = True
        give_back()


def end_without_gpu() -> None:
    """Ends this process if its GPU no longer answers, which no retry here changes; the directory starts another."""
    why = lost_gpu()
    if why is not None:
        _log.critical("the GPU answers this process no more, which ends: %s", why)
        logging.shutdown()
        os._exit(LOST_GPU)


class _Arrived(NamedTuple):
    """The rows of a micro-batch as they arrived.

    Attributes:
        table: all rows, in their order, but those of Parquet files.
        parts: the rows that lie in files worth keeping, and in Parquet files.
    """

    table: pa.Table
    parts: tuple[FilePart, ...]


_LOOKING: Final = 4
"""Threads that look at files as these arrive: check sums take longer than to map them."""


def _receive(
    reader: flight.MetadataRecordBatchReader,
    command: ApplyCommand,
    partition: PartitionState,
    activity: Activity,
    mapped: Mapped,
) -> _Arrived:
    """Receives the rows of a micro-batch, from the stream or from the files that they lie in.

    A stream that a client closes half-way looks like a whole one; the number of rows at its end tells them apart.
    """
    activity.begin(READING)
    schema = reader.schema
    command.wire.check(partition.description, schema)
    batches, parts = list[list[pa.RecordBatch] | Future[list[pa.RecordBatch]]](), list[FilePart]()
    promised, size, rows = None, 0, 0
    with ThreadPoolExecutor(_LOOKING, "files") as threads:  # nobody reads files any more when this ends
        for chunk in reader:
            activity.move()
            batch = chunk.data
            if chunk.app_metadata is not None:
                content = _content(chunk.app_metadata.to_pybytes())
                if isinstance(content, FilePart):
                    if content.sequence != rows:
                        problem = f"rows in a file come as row {content.sequence}; it is row {rows}'s turn"
                        raise DescriptionError(problem)
                    batch = None
                    size, rows = size + content.block.size, rows + content.block.rows
                    # looked at while the next ones come
                    batches.append(threads.submit(_part, content, mapped, schema, partition))
                    parts.append(content)
                else:
                    promised = content
            if batch is not None:
                _check(batch, partition)
                size, rows = size + batch.nbytes, rows + batch.num_rows
                batches.append([batch])
            if size > _MOST_BYTES:
                raise StateError(
                    f"batch {command.batch_id} has more than {_MOST_BYTES >> 30} GiB of rows for one partition, all "
                    "of this machine's memory: use more partitions, or smaller micro-batches"
                )
    whole = (some.result() if isinstance(some, Future) else some for some in batches)
    table = pa.Table.from_batches(itertools.chain.from_iterable(whole), schema)
    if promised is not None or command.counted:
        if promised is None:
            raise AbandonedError(f"the rows of batch {command.batch_id} end without their number")
        if promised != rows:
            raise AbandonedError(f"{rows} rows of batch {command.batch_id} came, {promised} were sent")
    sizes = collections.Counter[str]()
    for part in parts:
        sizes[part.block.file] += part.block.size
    least = KEPT * command.least_bytes
    return _Arrived(table, tuple(part for part in parts if part.columns or sizes[part.block.file] >= least))


def _part(part: FilePart, mapped: Mapped, schema: pa.Schema, partition: PartitionState) -> list[pa.RecordBatch]:
    """The rows of a message in a file; of a Parquet file none yet, it is only seen to be what was copied."""
    with read_anew(part.block.file):
        message = mapped.message(part.block)
        if part.columns:
            part.schema(schema)
            return []
        batches = part.rows(message, schema)
    for batch in batches:
        _check(batch, partition)
    return batches


def _check(batch: pa.RecordBatch, partition: PartitionState) -> None:
    """Refuses rows that would end the process that computes with them.

    Raises:
        BadInputError: names the column.
    """
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            check_array(column)
        except pa.ArrowException as error:
            names = "', '".join(source.name for source in partition.description.inputs)
            raise BadInputError(names, name, f"came damaged: {error}") from None


_BESIDE: Final = 'a message beside the rows is {"rows": n} or {"part": ...}'


def _content(content: bytes) -> int | FilePart:
    try:
        data = json.loads(content)
        if "part" in data:
            return FilePart.of(data["part"])
        rows = data["rows"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DescriptionError(_BESIDE) from error
    if type(rows) is not int:
        raise DescriptionError(_BESIDE)
    return rows


def _send(
    writer: flight.MetadataRecordBatchWriter, answer: Applied, command: ApplyCommand, answers: Path | None
) -> None:
    """Sends a task its share of an answer, in the order of the changes; the first task has all of a small one.

    It has all as well where files are asked for: whether they could be written is another matter after a restart.
    """
    changelog, number, of = answer.changelog, command.share, command.shares
    if of > 1 and (changelog.nbytes < command.least_bytes or command.files is not None):
        number, of = min(number, 1), 1
    begin, end = (min(one, of) * changelog.num_rows // of for one in (number, number + 1))
    changelog = changelog.slice(begin, end - begin)
    writer.begin(changelog.schema)
    block = None
    if answers is not None and changelog.nbytes >= command.least_bytes:
        block = leave(answers, changelog, ROWS_PER_MESSAGE)
    if block is None and changelog.num_rows:
        writer.write_table(changelog, max_chunksize=ROWS_PER_MESSAGE)
    facts = {
        "metrics": answer.metrics,
        "backend": answer.backend,
        "backend_reason": answer.backend_reason,
        "latest": answer.latest,
        **({} if block is None else {"left": block}),
        **({} if answer.files is None or command.share else {"files": answer.files}),
    }
    writer.write_metadata(json.dumps(facts).encode())


def main(arguments: list[str] | None = None) -> int:
    """Runs a state server until its standard input ends."""
    parser = argparse.ArgumentParser(prog="python -m gpu_ops.spark.server.server", description="A state server.")
    parser.add_argument("--backend", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument("--name", default="", help="what errors call it")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--gpu-memory", help="of all state; an amount, or a share of the card's")
    parser.add_argument("--host-memory", help="of all state; an amount, or a share of the machine's")
    parser.add_argument("--disk-limit", help="of all state; an amount, 0 for none")
    parser.add_argument("--disk-folder", help="where on local disk; several are separated by commas")
    parser.add_argument("--gpu-probe", choices=get_args(Probe), default="auto", help="how matching rows are found")
    parser.add_argument("--blocks", metavar="FOLDER", help="in which callers leave rows and take answers")
    parser.add_argument("--tls-certificate", nargs=2, metavar=("CHAIN", "KEY"), help="files in PEM")
    options = parser.parse_args(arguments)
    logging.basicConfig(
        level=logging.INFO,
        stream=sys.stderr,
        format="%(asctime)s state server %(process)d %(levelname)s %(message)s",
    )
    parent = os.getppid()
    # Ctrl-C in a notebook's terminal reaches the whole process group; the driver decides what stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        token = str(json.loads(sys.stdin.buffer.readline())["token"])
    except (ValueError, KeyError, TypeError) as error:
        sys.stderr.write(f'the first line of standard input must be {{"token": ...}}: {error!r}\n')
        return 2
    if len(token) < 16:
        sys.stderr.write("a token of fewer than 16 characters is none\n")
        return 2
    budget = server_budget(options.gpu_memory, options.host_memory, options.disk_limit, options.disk_folder)
    server = StateServer(
        token, backend=options.backend, host=options.host, port=options.port, budget=budget,
        probe=options.gpu_probe, certificate=options.tls_certificate, name=options.name,
        blocks=options.blocks,
    )  # fmt: skip
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as greeting:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # nobody reads more of it, whatever a library writes
        found, why = (True, "") if options.backend == "cpu" else gpu_available()
        facts = {"port": server.port, "pid": os.getpid(), **({} if found else {"on_cpu": why})}
        greeting.write(json.dumps(facts) + "\n")
    _log.info("listening on %s, port %d", options.host, server.port)
    importlib.import_module("cpu_fallback")  # half a second, and either backend needs it; a call may come meanwhile
    _wait(server, parent)
    # Calls in progress are not waited for long: what they did durably stays, the rest is repeated.
    server.end()
    files.remove_abandoned(Path(tempfile.gettempdir()))  # a killed application's
    logging.shutdown()
    sys.stderr.flush()
    os._exit(0)


def _wait(server: StateServer, parent: int) -> None:
    """Returns when standard input ends, the parent is gone, or a client asks for it.

    The parent is watched by its id: PR_SET_PDEATHSIG fires already when the thread that started this
    process ends, as threads of a Spark driver do.
    """
    source = sys.stdin.fileno()
    while not server.stopping.is_set():
        ready, _, _ = select.select([source], [], [], _POLL_S)
        if ready and not os.read(source, 4096):
            _log.info("standard input has ended; stopping")
            return
        if os.getppid() != parent:
            _log.info("the parent process is gone; stopping")
            return
        server.trim()


def server_budget(gpu: str | None, host: str | None, disk: str | None = None, folder: str | None = None) -> Budget:
    """Makes the memory budget that all partitions of a server share.

    Args:
        gpu: an amount, or a share of the card's whole memory; None for what the card has free.
        host: an amount, or a share of the machine's memory; None for no limit.
        disk: an amount; None for all that is free.
        folder: the folder on local disk, see `Budget`.

    Raises:
        DescriptionError: an argument is no amount of memory.
    """
    on_card = None if gpu is None else memory_size(gpu)
    if isinstance(on_card, float):
        total = _card()
        on_card = None if total is None else int(on_card * total)
    on_host = None if host is None else memory_size(host)
    if isinstance(on_host, float):
        on_host = int(on_host * host_memory())
    _log.info("memory for state: %s bytes on the GPU, %s on the host", on_card or "any", on_host or "any")
    on_disk = None if disk is None else disk_size(disk)
    return Budget(on_card, on_host, on_disk, folder)


def _card() -> int | None:
    """The bytes of the card's memory, used or not; None where there is no card."""
    found, why = gpu_available()
    try:
        if found:
            from gpu_ops.cudf_backend.device import total_memory  # noqa: PLC0415 - only where a card is

            return total_memory()
    except Exception as error:  # it has no room for anything at this moment
        why = str(error)
    _log.info("no GPU to limit the memory of: %s", why)
    return None


if __name__ == "__main__":
    sys.exit(main())
