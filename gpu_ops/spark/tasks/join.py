"""The Spark task of a streaming operator: one exchange with the state server that owns the task's partition."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import itertools
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple, cast

import pyarrow as pa
import pyarrow.compute as pc

from gpu_ops.descriptions.dataflow import NUMBER, Dataflow
from gpu_ops.descriptions.projection import Projection
from gpu_ops.errors import GpuJoinError, StateError
from gpu_ops.spark.metrics.metrics import METRICS_TYPE, of_operators, pack, total
from gpu_ops.spark.tasks.arrow import PARTITION, ArrowTask, TaskIdentity, task_identity
from gpu_ops.spark.tasks.file import FileWriter
from gpu_ops.spark.tasks.packing import Packer
from gpu_ops.spark.tasks.read_ahead import left_for_next
from gpu_ops.spark.tasks.rows import Encoder, encode_projected
from gpu_ops.spark.wire.arrivals import Arrivals, Message, by_operator
from gpu_ops.spark.wire.command import EventTimes, LocateReply, LocateRequest, ReportReply, ReportRequest, Wire, read
from gpu_ops.spark.wire.connection import Address
from gpu_ops.spark.wire.exchange import Exchange, ask
from gpu_ops.state.address import StateAddress
from gpu_ops.state.blocks import Blocks, FilePart

HEARTBEAT: Final = ".heartbeat"
"""The end of the name of an input that has no rows, and is there so that micro-batches come."""

Encode = Callable[[str, Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""Encodes the changes of one partition of an operator, which its plan id names, in their order."""


class OperatorTask(ArrowTask):
    """A function of ``mapInArrow`` that gives an operator's changes, with hidden metrics if they are observed.

    Attributes:
        output: the changelog's schema.
        hidden: the column in which metrics are observed, or None.
    """

    __name__: str
    output: pa.Schema
    hidden: str | None

    @property
    @abc.abstractmethod
    def operators(self) -> tuple[ChainedOperator, ...]:
        """The operators that the task runs, each behind those that it reads."""

    @abc.abstractmethod
    def results(
        self, batches: Iterator[pa.RecordBatch], encode: Encode, metrics: list[str]
    ) -> Iterator[pa.RecordBatch]:
        """Yields the encoded changes of each partition that this Spark task has.

        Args:
            batches: the messages that come, of `PACKED`.
            encode: encodes the changes of a partition.
            metrics: takes as text what was counted of an operator in all of its partitions, where metrics are observed
                and the last of these is here.
        """

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the changes; where metrics are observed, then rows of them."""
        metrics = list[str]()
        yield from self.results(batches, lambda _, rows: (self._with_metrics(some, None) for some in rows), metrics)
        for text in metrics:
            # The row kind is the one column that is never null; no row kind is empty.
            columns = [pa.array([""]), *(pa.nulls(1, field.type) for field in list(self.output)[1:])]
            yield self._with_metrics(pa.RecordBatch.from_arrays(columns, schema=self.output), text)

    def _with_metrics(self, rows: pa.RecordBatch, text: str | None) -> pa.RecordBatch:
        """Changes with a text in the hidden column, where there is one."""
        if self.hidden is None:
            return rows
        metrics = pa.nulls(rows.num_rows, METRICS_TYPE) if text is None else pa.array([text], METRICS_TYPE)
        schema = self.output.append(pa.field(self.hidden, METRICS_TYPE))
        return pa.RecordBatch.from_arrays([*rows.columns, metrics], schema=schema)


class Task(OperatorTask):
    """Function for ``mapInArrow``: takes packed rows, yields the changelog, with hidden metrics if they are observed.

    Args:
        name: the function's name in Spark's plans.
        command: the exchange's command without query, batch and partition.
        directory: the directory that knows the server.
        arrivals: unpacks and orders the rows.
        output: the changelog's schema.
        metrics: the names of the metrics, see `gpu_ops.spark.metrics.metrics.metric_names`.
        times: the inputs of operators by event time, whose latest times are reported to the directory.
        hidden: the column in which metrics are observed, or None.
        blocks: the folders in which the server may leave its answer, if it is on this machine.
        shares: the number of Spark tasks of each partition. All bring its rows, the first to come has them computed,
            and each takes a share of the changes.
    """

    def __init__(
        self,
        name: str,
        command: Mapping[str, Any],
        directory: Address,
        arrivals: Arrivals,
        output: pa.Schema,
        *,
        metrics: Sequence[str] = (),
        times: Sequence[str] = (),
        hidden: str | None = None,
        blocks: Blocks | None = None,
        shares: int = 1,
    ) -> None:
        self.__name__, self._blocks, self.shares = name, blocks, shares
        self.command, self._directory, self.arrivals = dict(command), directory, arrivals
        self.output, self._times = output, times
        self.metrics, self.hidden = tuple(metrics), hidden

    def results(
        self, batches: Iterator[pa.RecordBatch], encode: Encode, metrics: list[str], files: Encoded | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yields the encoded changes of this Spark task's partition, or of its share of them.

        Args:
            batches: the messages that come, of `PACKED`.
            encode: encodes the changes.
            metrics: takes as text what was counted.
            files: what makes files of the changes, where the state server is asked to: then what is encoded may be
                the rows that stand for these.
        """
        task = task_identity()
        target, batches = self._target(task, batches)
        partition, share = divmod(target, self.shares)
        changes = self.changes(
            task,
            self.located(task, uuid.uuid4().hex, partition),
            batches,
            lambda request: metrics.extend(self.observed(*self.report([request]))),
            share=(share, self.shares),
            files=files,
        )
        yield from self._encoded(encode, changes)

    def _encoded(self, encode: Encode, changes: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Encodes what comes out of the state server."""
        return encode(self.plan_id, changes)

    @property
    def operators(self) -> tuple[ChainedOperator, ...]:
        """A chain of this operator alone."""
        return (ChainedOperator(self),)

    @property
    def plan_id(self) -> str:
        """The plan id of the operator."""
        return str(self.command["join_id"])

    @property
    def partitions(self) -> int:
        """The number of the operator's partitions."""
        return int(self.command["partitions"])

    def located(self, task: TaskIdentity, evaluation: str, partition: int) -> LocateRequest:
        """The request to the directory for the server of a partition.

        Args:
            task: the Spark task that asks.
            evaluation: another one each time that the task runs.
            partition: the partition's number.
        """
        state: StateAddress | None = self.command["state"]
        return LocateRequest(
            join_id=f"{self.plan_id}-{task.query_id}", query_id=task.query_id, run_id=task.run_id,
            batch_id=task.batch_id, state=None if state is None else state.secret_uri, backend=self.command["backend"],
            partition=partition, partitions=self.partitions, attempt=task.attempt, evaluation=evaluation,
            backlog=bool(self.command["options"].get("backlog", False)),
            timed=any("watermark_ms" in one.task.metrics for one in self.operators),
        )  # fmt: skip

    def locate(self, requests: Sequence[LocateRequest]) -> list[LocateReply]:
        """Asks the directory for the servers of partitions, be they of this operator or of others."""
        each = ask(self._directory, "locate", {"each": requests})["each"]
        return [read(LocateReply, one) for one in each]

    def report(self, requests: Sequence[ReportRequest]) -> list[ReportReply]:
        """Reports to the directory what was counted, be it of this operator or of others."""
        each = ask(self._directory, "report", {"each": requests})["each"]
        return [read(ReportReply, one) for one in each]

    def observed(self, reply: ReportReply) -> Iterator[str]:
        """The metrics of all partitions as text, for each of `operators`, if the reply has them."""
        names = [one.task.metrics for one in self.operators]
        return map(total, names, [] if reply.all is None else of_operators(names, reply.all))

    def changes(
        self,
        task: TaskIdentity,
        located: LocateRequest,
        batches: Iterator[pa.RecordBatch],
        report: Callable[[ReportRequest], object],
        *,
        reply: LocateReply | None = None,
        share: tuple[int, int] = (0, 1),
        files: Encoded | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The changes of one partition.

        Args:
            task: which Spark task asks for them.
            located: the request for the partition's server.
            batches: its messages, of `PACKED`.
            report: takes what was counted.
            reply: the directory's reply to the request, where it was asked already.
            share: which of how many shares of the changes.
            files: what makes files of them, where the state server is asked to write these.

        Raises:
            StateError: a server was repeated by one that answers otherwise; another attempt of the task may succeed.
        """
        partition = located.partition
        command = {
            **self.command,
            "join_id": located.join_id,
            "query_id": task.query_id,
            "state": located.state,
            "counted": True,
            "batch_id": task.batch_id,
            "partition": partition,
        }
        if self._blocks is not None and (folder := self._blocks.of(task.run_id, task.batch_id)) is not None:
            command |= {"answers": str(folder), "least_bytes": self._blocks.least_bytes}
        found = list[tuple[Address, Mapping[str, Any]]]()

        def locate(failed: str | None) -> tuple[Address, Mapping[str, Any]]:
            answer = reply
            if failed is not None or answer is None or answer.location is None:
                (answer,) = self.locate([dataclasses.replace(located, failed=failed)])
            assert answer.location is not None
            context = vars(answer.context) | ({} if share[1] == 1 else {"shared_in": task.run_id})
            if answer.context.shared_in is not None:
                context["files"] = None  # others take these changes, too
            found.append((self._directory._replace(location=answer.location), context))
            return found[-1]

        packed = list(batches)
        arrived: Iterable[pa.RecordBatch | FilePart] = self.arrivals.to_wire(iter(packed))
        if share[1] > 1:
            arrived = list(arrived)
            count = sum(rows.block.rows if isinstance(rows, FilePart) else rows.num_rows for rows in arrived)
            command |= {"share": share[0], "shares": share[1], "rows": count}
        writer = None
        if files is not None:
            writer = cast("FileWriter", files.encoder)
            command["files"] = vars(writer.request(files.projection, task))
        exchange, came = Exchange(locate, command, self.arrivals.wire), False
        for rows in exchange.run(arrived):
            if rows.num_rows:  # nobody's readers of Arrow streams are tried with batches that have no row
                came = True
                yield rows
        if writer is not None and "files" in exchange.answer:
            if came:
                raise StateError(f"a state server gave changes of '{self.plan_id}', and the one in its place files")
            yield writer.placed(exchange.answer["files"])
        if share[0]:
            return  # one of a partition's tasks reports what was counted
        if writer is None:
            self._send_ahead(task, partition, packed, {**command, **found[-1][1]}, found[-1][0])
        counted = exchange.answer["metrics"]
        of_exchange = {"backend": exchange.answer["backend"], "retries": exchange.retries}
        counts = zip(self.operators, self._counted(counted), strict=True)
        numbers = [number for one, its in counts for number in pack(one.task.metrics, its, **of_exchange)]
        rows = [bool(counted[f"{side}_rows_in"]) for side in self._times]
        times = EventTimes.of(exchange.answer["latest"], rows) if self._times else None
        observed = self.hidden is not None
        report(
            ReportRequest(
                located.join_id, task.run_id, task.batch_id, partition, self.partitions, numbers, observed, times
            )
        )

    def _send_ahead(
        self,
        task: TaskIdentity,
        partition: int,
        came: Sequence[pa.RecordBatch],
        command: Mapping[str, Any],
        server: Address,
    ) -> None:
        """Sends the server what is read ahead for the next micro-batch, in a thread; see `ApplyCommand.ahead`."""
        folder = None if self._blocks is None else self._blocks.of(task.run_id, task.batch_id + 1)
        if folder is None or command["state"] is None or command["clock_ms"] is not None or command["backlog"]:
            return
        of_files = [one for batch in came for one in map(Message.of, batch["about"].to_pylist()) if one.source]
        if not of_files:
            return

        def locate(failed: str | None) -> tuple[Address, Mapping[str, Any]]:
            if failed is not None:
                raise StateError("who asks for this micro-batch finds another server")
            return server, {"ahead": True, "batch_id": task.batch_id + 1, "answers": None, "shares": 1, "share": 0}

        def send() -> None:
            with contextlib.suppress(GpuJoinError):
                batches = left_for_next(folder, of_files)
                if batches is not None:
                    own = self._messages_of(partition, batches)
                    for _ in Exchange(locate, command, self.arrivals.wire).run(list(self.arrivals.to_wire(own))):
                        pass

        threading.Thread(target=send, name="gpu-join-ahead", daemon=True).start()

    def _messages_of(self, partition: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Selects the messages that are for a partition of this operator."""
        operators = self.arrivals.of_operators(self.plan_id)
        for batch in batches:
            for operator, target, some in by_operator(batch):
                if target == partition * self.shares and operator in operators:
                    yield some

    def _counted(self, counted: Mapping[str, Any]) -> Iterable[Mapping[str, Any]]:
        """The metrics of each of `operators`, out of those of their engine."""
        return [counted]

    def _target(self, task: TaskIdentity, batches: Iterator[pa.RecordBatch]) -> tuple[int, Iterator[pa.RecordBatch]]:
        """Finds which of the operator's tasks this is, which its batches say, and returns it with the batches.

        Without batches, as in all tasks or in none, it is the task's number modulo the number of tasks: those of an
        operator are numbered consecutively, so each is taken once.
        """
        for batch in batches:
            if batch.num_rows:
                return Message.of(batch["about"][0].as_py()).target, itertools.chain([batch], batches)
        return task.number % (self.partitions * self.shares), iter(())


class Edge(NamedTuple):
    """An edge of a chain: the changes that an operator reads of another one in the same task.

    Attributes:
        projection: the filter and projection of these changes.
        packer: divides them into the partitions of the operator that reads them.
    """

    projection: Projection
    packer: Packer


class ChainedOperator(NamedTuple):
    """An operator of a `OperatorChain`, and what others in it read of its changes."""

    task: Task
    edges: tuple[Edge, ...] = ()

    def packed(self, changes: Sequence[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Packs what the other operators read of a partition's changes."""
        for edge in self.edges:
            yield from encode_projected(changes, edge.projection, edge.packer)


class DataflowTask(Task):
    """Operators that read one another's changes, in one engine: what a `Task` is for one operator.

    Args:
        operators: as they would be in an `OperatorChain`, which may still become of them; the last one's name, output
            and servers are the task's.
        dataflow: its description.
        wire: the layout of the rows from outside.
        arrivals: unpacks and orders them.
        outputs: where the dataflow has several outputs, the plan ids of the operators that make them.
    """

    def __init__(
        self,
        operators: Sequence[ChainedOperator],
        dataflow: Dataflow,
        wire: Wire,
        arrivals: Arrivals,
        outputs: Sequence[str] = (),
    ) -> None:
        last = operators[-1].task
        vars(self).update(vars(last))
        self._operators, self.dataflow, self.arrivals = tuple(operators), dataflow, arrivals
        self._outputs = tuple(outputs)
        self._times = [f"{name}.{side}" for name, one in dataflow.timed.items() for side in one.sides]
        self.command = {**last.command, "description": dataflow.to_json(), "wire": wire.to_dict()}

    @property
    def operators(self) -> tuple[ChainedOperator, ...]:
        """The operators of the dataflow."""
        return self._operators

    def union_order(self, uses: Iterable[str]) -> str:
        """The numbers of the dataflow's inputs as they stand in Spark's union; ``uses``: `JoinPlan.union_inputs`."""
        numbers = {f"{plan_id}.{number}": place for (plan_id, number), place in (self.arrivals.numbers or {}).items()}
        return ",".join(str(numbers[use]) for use in uses if not use.endswith(HEARTBEAT))

    def _encoded(self, encode: Encode, changes: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if not self._outputs:
            yield from super()._encoded(encode, changes)
            return
        rows = list(changes)
        schemas = {one.task.plan_id: one.task.output for one in self._operators}
        for number, plan_id in enumerate(self._outputs):
            places = {its[number]: f"c{place}" for place, (its, _) in enumerate(self.dataflow.shared) if number in its}
            yield from encode(plan_id, _output(rows, number, places, schemas[plan_id]))

    def _counted(self, counted: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        for vertex in self.dataflow.operators:
            prefix = f"{vertex.name}."
            own = {key.removeprefix(prefix): value for key, value in counted.items() if key.startswith(prefix)}
            # what is counted of the engine as a whole is the last operator's
            yield {**counted, **own} if vertex is self.dataflow.operators[-1] else own


def _output(
    rows: Iterable[pa.RecordBatch], number: int, places: Mapping[str, str], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The rows of one of several outputs, in its own columns, out of those that outputs share."""
    names = [places.get(name, name) for name in schema.names]  # row kinds have a column of their own
    for batch in rows:
        own = batch.select(names).filter(pc.equal(batch[NUMBER], number))
        if own.num_rows:
            yield pa.RecordBatch.from_arrays(own.columns, schema=schema)


class OperatorChain(OperatorTask):
    """Operators that read one another's changes, all partitions of each, in one Spark task.

    An operator's partitions compute side by side, each in its state server, when those of the operators that it reads
    are done. What lies between two operators is cut here, as Spark's shuffle would do; a stage of Spark's for each
    operator costs two to three times as much. State, versions and repetitions are those of each operator.

    Args:
        operators: each behind those that it reads.
        outputs: the plan ids of those whose changes come out; None for the last one's.
    """

    def __init__(self, operators: Sequence[ChainedOperator], outputs: Iterable[str] | None = None) -> None:
        last = operators[-1].task
        self.__name__, self.output, self.hidden = last.__name__, last.output, last.hidden
        self._outputs = frozenset([last.plan_id] if outputs is None else outputs)
        self._operators = tuple(
            one._replace(edges=tuple(edge._replace(packer=edge.packer.unshared()) for edge in one.edges))
            for one in operators
        )

    @property
    def operators(self) -> tuple[ChainedOperator, ...]:
        """All operators of the chain, the last one last."""
        return self._operators

    def results(
        self, batches: Iterator[pa.RecordBatch], encode: Encode, metrics: list[str]
    ) -> Iterator[pa.RecordBatch]:
        """Runs the operators one after the other, the partitions of each side by side, and encodes what comes out."""
        task, evaluation, last = task_identity(), uuid.uuid4().hex, self.operators[-1].task
        messages: dict[str, dict[int, list[pa.RecordBatch]]] = {each.task.plan_id: {} for each in self.operators}
        shares = {each.task.plan_id: each.task.shares for each in self.operators}

        def put(packed: Iterable[pa.RecordBatch], shares: Mapping[str, int]) -> None:
            for batch in packed:
                for operator, target, some in by_operator(batch):
                    partition, share = divmod(target, shares.get(operator, 1))
                    if not share:  # what others would bring is the same
                        messages[operator].setdefault(partition, []).append(some)

        put(batches, shares)
        located = [
            one.task.located(task, evaluation, partition)
            for one in self.operators
            for partition in range(one.task.partitions)
        ]
        replies = last.locate([dataclasses.replace(request, waits=False) for request in located])
        asked, reports, told = iter(zip(located, replies, strict=True)), list[ReportRequest](), list[ReportReply]()
        try:
            with ThreadPoolExecutor(max(each.task.partitions for each in self.operators)) as threads:
                for operator in self.operators:
                    plan_id = operator.task.plan_id
                    come = messages.pop(plan_id)
                    computed = threads.map(
                        functools.partial(_in_partition, operator, encode if plan_id in self._outputs else None),
                        range(operator.task.partitions),
                        [
                            operator.task.changes(
                                task, request, iter(come.pop(request.partition, ())), reports.append, reply=reply
                            )
                            for request, reply in itertools.islice(asked, operator.task.partitions)
                        ],
                    )
                    for packed, encoded in computed:
                        put(packed, {})
                        yield from encoded
        finally:  # also where nobody takes all of the changes
            if reports:
                told = last.report(reports)
        # where a task is repeated, several partitions may be told that they are the last
        complete = {request.join_id: one for request, one in zip(reports, told, strict=True) if one.all is not None}
        for operator in self.operators:
            reply = complete.get(f"{operator.task.plan_id}-{task.query_id}")
            metrics += () if reply is None else operator.task.observed(reply)


def _in_partition(
    operator: ChainedOperator, encode: Encode | None, partition: int, changes: Iterable[pa.RecordBatch]
) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
    """Packs and encodes a partition's changes in a thread, which stands for the Spark task that it might have had."""
    PARTITION.set(partition)
    packed = list[pa.RecordBatch]()
    if operator.edges:
        changes = list(changes)
        packed = list(operator.packed(changes))
    return packed, [] if encode is None else list(encode(operator.task.plan_id, iter(changes)))


class Encoded(NamedTuple):
    """A part of an operator's changes, and its encoder.

    Attributes:
        operator: its plan id.
        projection: the filter and projection of the changes.
        encoder: encodes them.
    """

    operator: str
    projection: Projection
    encoder: Encoder


class EncodeChanges(ArrowTask):
    """Runs operators and encodes changelogs in the same task: as files, messages or packed rows; metrics pass through.

    Args:
        task: the operators' task, which yields the changes.
        encoded: what is encoded, all of it with one schema of the result.
    """

    def __init__(self, task: OperatorTask, *encoded: Encoded) -> None:
        self.__name__ = task.__name__
        self.task, self.encoded = task, encoded

    def run(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the encoded changes of a partition, and the rows of metrics where the task has some."""
        hidden, metrics = self.task.hidden, list[str]()
        first, task = self.encoded[0], self.task
        if isinstance(task, Task) and isinstance(first.encoder, FileWriter) and first.encoder.by_card:
            encoded = task.results(batches, self._encode, metrics, first)
        else:
            encoded = task.results(batches, self._encode, metrics)
        output = first.encoder.output_schema
        if hidden is None:
            yield from encoded
            return
        schema = output.append(pa.field(hidden, METRICS_TYPE))
        for rows in encoded:
            yield pa.RecordBatch.from_arrays([*rows.columns, pa.nulls(rows.num_rows, METRICS_TYPE)], schema=schema)
        for text in metrics:
            nothing = [pa.nulls(1, kind) for kind in output.types]
            yield pa.RecordBatch.from_arrays([*nothing, pa.array([text], METRICS_TYPE)], schema=schema)

    def _encode(self, operator: str, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        own = [one for one in self.encoded if one.operator == operator]
        first = next(rows, None)
        if first is not None and first.schema.equals(own[0].encoder.output_schema):  # a state server has encoded them
            yield first
            yield from rows
            return
        rows = itertools.chain([] if first is None else [first], rows)
        kept = rows if len(own) == 1 else list(rows)
        for one in own:
            yield from encode_projected(kept, one.projection, one.encoder)
