"""JoinEngine: one partition of one join, tables in, a changelog out. No Spark here."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from gpu_ops import operators
from gpu_ops.backends import Backend, make_kernels
from gpu_ops.descriptions.arguments import ENGINE_OPTIONS, check_engine_option, described, with_engine_options
from gpu_ops.descriptions.changelog import BAD_ROW_KIND, FOLDED
from gpu_ops.descriptions.dataflow import Dataflow
from gpu_ops.descriptions.description import Description, line
from gpu_ops.descriptions.inputs import Input
from gpu_ops.display import Explanation, Tables, changes_of, lookups_text, operator_box, source_box
from gpu_ops.errors import BackendError, DescriptionError, StateError
from gpu_ops.fields import reading, whole_number
from gpu_ops.ingest import ArrowStream, Ingested, ingest, repeatable
from gpu_ops.kernels import Probe
from gpu_ops.memory import Budget, Memory
from gpu_ops.operators.backlog import Backlog
from gpu_ops.operators.operator import Operator
from gpu_ops.output import Beside, Changelog, Fold, Output, changelog, together
from gpu_ops.state.pieces import FromSnapshot, Storable, whole

InputBatch: TypeAlias = "ArrowStream | None"
Watermark: TypeAlias = "int | tuple[int | None, int | None] | None"
"""The operator's, or that of each input, in milliseconds since the epoch."""
OutputFormat = Literal["arrow", "cudf", "pandas", "polars"]
"""As what an engine gives its changelogs: Arrow tables, or DataFrames of one of these."""

_log = logging.getLogger("gpu_ops")

_SET_BACK_MS: Final = 1000
"""By so much more a clock is said to have been set back."""
_KINDS: Final = ("insert", "update_before", "update_after", "delete")
"""By their codes."""


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """The output of a micro-batch.

    Attributes:
        changelog: rows of the join's ``output_schema``: an Arrow table, or a ``cudf.DataFrame`` if the engine's
            ``output`` is ``"cudf"``.
        sequence: for each of them, the sequence (place in the micro-batch's total order) of the change that caused
            it; 0 throughout in ``per_batch``, but for an interval join; -1 for what the watermark ended.
        metrics: counts, bytes and milliseconds, by name.
    """

    changelog: Changelog
    sequence: npt.NDArray[np.int64]
    metrics: dict[str, int | float]


class JoinEngine:
    """A streaming join over one partition.

    Args:
        description: its description: a `Join`, `MultiJoin`, `Aggregate` or `CoGroup`.
        backend: ``"auto"``, ``"cpu"`` or ``"gpu"``.
        memory_limit: bytes that state may take: of host memory, or with the GPU of its memory, working memory
            included. Beyond that the coldest state moves to the host, or from there to local disk. A `Budget` has all
            limits, and may be shared. On the host a micro-batch's output may not take more than that, either, nor
            more than the machine has left.
        tiny: test setting: the smallest possible segments.
        backlog: begin with a backlog: see `prepare`.
        probe: how the GPU finds matching rows: ``"hash_join"`` by cuDF's hash join, ``"index"`` by a search of a sorted
            index, ``"auto"`` by whichever costs less, which is nearly always the search.
            Rows and their order are the same.
        output: what changelogs are: ``"arrow"`` tables, ``"pandas"`` or ``"polars"`` DataFrames, or with the GPU
            ``"cudf"`` ones, whose rows do not leave it.
        fold: whether what the changelogs add up to is kept, for `table`.

    Raises:
        BackendError: the GPU was asked for and none answers; or ``output="cudf"`` without the GPU or cuDF, or with a
            column that cuDF has no type for: a date, bytes, a timestamp with a zone, something nested.

    Example:
        >>> engine = JoinEngine(join)
        >>> engine.process(left=orders, right=prices)

        DataFrames of cuDF's in, one out, and no row on the host in between:

        >>> engine = JoinEngine(join, "gpu", output="cudf")
        >>> engine.process(left=cudf.DataFrame({"id": [1, 2], "item": ["book", "pen"]}))
    """

    def __init__(
        self,
        description: Description,
        backend: Backend = "auto",
        *,
        memory_limit: int | Budget | None = None,
        tiny: bool = False,
        backlog: bool = False,
        probe: Probe = "auto",
        output: OutputFormat = "arrow",
        fold: bool = False,
    ) -> None:
        if not isinstance(description, Description):
            raise DescriptionError(f"an engine takes the description of a join, not {type(description).__name__}")
        self.description = description
        if output not in get_args(OutputFormat):
            raise DescriptionError(f"output={output!r}; it is one of {', '.join(get_args(OutputFormat))}")
        limit = memory_limit.gpu if isinstance(memory_limit, Budget) else memory_limit
        self.kernels, self.backend_reason = make_kernels(backend, tiny_segments=tiny, memory_limit=limit, probe=probe)
        self.backend = self.kernels.name
        self._output = output
        if output == "cudf":
            self._give_frames()
        self._fold = Fold(description.output_schema) if fold else None
        self.memory = Memory(self.kernels, memory_limit)
        if backlog:
            description.check_backlog()
        self._clock_ms: int | None = None
        self._clock_before: int | None = None
        self._clock_was_set_back = False
        self._prepared = False
        self._finished = False
        self._closed = False
        self.needs_restore = False
        """Whether a micro-batch could be neither made final nor taken back: what the engine holds is wrong."""
        self._begins_with_backlog = backlog
        self._backlog: Backlog | None = None
        self._operator = self._fresh_operator()

    def _give_frames(self) -> None:
        """Have changelogs made as DataFrames, if they can be."""
        frames, cpu = self.kernels.dataframes, f"the GPU backend is needed, this is the CPU's ({self.backend_reason})"
        problem = cpu if frames is None else frames.lacks(self.description.output_schema)
        if problem is not None:
            self.kernels.close()
            raise BackendError(f"output='cudf': {problem}")
        self.kernels.gives_frames = True

    def _fresh_operator(self) -> Operator:
        if self._begins_with_backlog:
            self._backlog = Backlog(self.description, self.kernels, self.memory)
            return self._backlog
        return operators.make(self.description, self.kernels, self.memory)

    # --- micro-batches -----------------------------------------------------------------------

    def process(self, *inputs: InputBatch, **options: Any) -> Changelog:
        """Apply one micro-batch and return its changelog; arguments as `prepare`."""
        result = self.prepare(*inputs, **options)
        self.commit()
        return result.changelog

    def finish(self) -> Changelog:
        """End the input: the output that is left.

        With ``emit="at_end"`` that is the whole result, as insertions; nothing may follow. So it is for a backlog that
        no live micro-batch has followed, but one still may. Otherwise it is an
        interval join's unmatched rows; rows that come after it are late.

        Raises:
            StateError: a micro-batch is prepared, or the input has ended already.
        """
        with self._ending() as ending:
            parts = [self.description.output_schema.empty_table(), *ending, *self._operator.finish()]
            return self._in_output_format(together(self.description.output_schema, self.kernels, parts))

    def finish_parts(self) -> Iterator[Changelog]:
        """Ends the input like `finish`, in parts: with ``emit="at_end"`` the result need not fit in memory."""
        with self._ending() as ending:
            for part in ending:
                yield self._in_output_format(part)
            for part in self._operator.finish():
                yield self._in_output_format(part)

    def table(self) -> Changelog:
        """Folds the changelogs so far: the rows that are there now, in the engine's ``output`` format.

        They are those of the last commit, and part of `snapshot` and `restore`.

        Raises:
            DescriptionError: the engine was not made with ``fold=True``.
            StateError: the engine was restored from a snapshot that does not have them.
        """
        if self._fold is None:
            raise DescriptionError("table() is of an engine that was made with fold=True, as gpu_ops.engine() does")
        return self._as_output(self._fold.rows())

    def __repr__(self) -> str:
        """Describes the operator and its backend."""
        head, *lines = self.description.lines()
        lines += [line("emit", self.description.emit), line("backend", f"{self.backend} ({self.backend_reason})")]
        lines += [line("lookups", lookups_text(self.kernels.lookups))] if self.backend == "gpu" else []
        lines += [
            line("input", f"{x.name}: {changes_of(x)}; {len(x.schema.names)} columns") for x in self.description.inputs
        ]
        return "\n".join([head, *lines])

    def _repr_html_(self) -> str:
        picture = operator_box(self.description.lines()[0], [source_box(x.name) for x in self.description.inputs])
        rows = ""
        if self._fold is not None and self._fold.known:
            rows = Tables({"": self._fold.rows()})._repr_html_()
        return Explanation(repr(self), picture)._repr_html_() + rows

    @contextlib.contextmanager
    def _ending(self) -> Iterator[list[Changelog]]:
        """The changelog of what waits for the watermark, if anything may; final, once what comes of it is there."""
        self._check_there()
        if self._prepared:
            raise StateError("commit or discard the prepared micro-batch before the input ends")
        self._check_open()
        before, last = self._clock_ms, self._operator.last_watermark_ms
        self._finished = self.description.emit == "at_end"
        try:
            if last is None:
                yield [] if self._finished else [self.description.output_schema.empty_table()]
            else:
                nothing = [None] * len(self.description.inputs)
                # by processing time the clock is what goes to the end; a TTL has not passed because the input ends
                now = self._clock if self.description.by_event_time else last
                yield [
                    self._begin(ingest(self.description, nothing, nothing), now, last, time.perf_counter()).changelog
                ]
            if self._prepared:
                self.commit()
            elif self._fold is not None:
                self._fold.commit()
        except BaseException:
            self._finished = False
            self.needs_restore |= self._operator.half_ended
            if self._prepared:
                self.discard()
            elif self._fold is not None:
                self._fold.discard()
            raise
        finally:
            self._clock_ms = before

    def _check_open(self) -> None:
        self._check_there()
        if self._finished:
            raise StateError("the input has ended: with emit='at_end' nothing follows its result")

    def _check_there(self) -> None:
        if self._closed:
            raise StateError("the engine is closed")
        if self.needs_restore:
            raise StateError(
                "an error left a micro-batch half done, and it could not be taken back, so what this engine holds is "
                "wrong: restore it from a snapshot, or make a new engine"
            )

    def prepare(
        self,
        *inputs: InputBatch,
        left: InputBatch = None,
        right: InputBatch = None,
        orders: Sequence[npt.ArrayLike] | None = None,
        left_order: npt.ArrayLike | None = None,
        right_order: npt.ArrayLike | None = None,
        clock_ms: int | None = None,
        watermark: Watermark = None,
        backlog: bool = False,
        **named: InputBatch,
    ) -> MicroBatch:
        """Compute one micro-batch without changing the committed state.

        Args:
            inputs: the changes of each input, in the join's order: its columns and its row-kind column, or None. An
                Arrow table, or a DataFrame of pandas, polars or whatever else has ``__arrow_c_stream__``, or of cuDF,
                whose index does not count. With the GPU the rows of cuDF's stay there, and its text is taken for valid
                UTF-8; they go through host memory if a column is nested or categorical, if one of them is an
                error, and where changes are only kept (``emit="at_end"``, a backlog).
            left: of a join of two inputs, the left's changes; instead of ``inputs``.
            right: the right's, likewise.
            orders: for each input one integer per change, which together put the changes of all inputs in a
                total order; without them the first input's rows come first, and so on. An input's
                ``sequence_by`` orders its own changes, and if all inputs have one, all of them.
            left_order: of a join of two inputs, the left's.
            right_order: the right's, likewise.
            clock_ms: the time that rows of this micro-batch have by state TTL and processing time, ms since the
                epoch; default now. One that is set back is taken as it is, with a warning in the log.
            watermark: of an interval join: the one in force for this micro-batch: what it ends comes out first,
                then the rows come. By default, what follows from the inputs' delays and the event times of
                earlier micro-batches. It never goes back.
            backlog: these changes are backlog: they are kept, without output. The first micro-batch that is not
                has their net result first, as insertions with the sequence -1. After it, all are live.
            named: the changes of inputs by the inputs' own names, instead of ``inputs``.

        Returns:
            The changelog, to be followed by `commit` or `discard`.

        Raises:
            BadInputError: a change that cannot be joined; nothing has changed.
            DescriptionError: a watermark where none has a meaning; nothing has changed.
            StateError: more state, or a larger micro-batch, than ``memory_limit`` allows; nothing has changed.
        """
        self._check_open()
        if self._prepared:
            raise StateError("the last micro-batch was neither committed nor discarded")
        if watermark is not None and not self.description.by_time:
            raise DescriptionError("a watermark has a meaning in joins by time only")
        started = time.perf_counter()
        if self._fold is not None:  # before anything changes, so that nothing of a commit can fail or be interrupted
            self._fold.settle()
        if self._backlog is not None:
            self._backlog.backlog = backlog
        elif backlog:
            raise DescriptionError("this engine does not begin with a backlog: make it with backlog=True")
        if hasattr(orders, "__arrow_c_stream__") and any(source.name == "orders" for source in self.description.inputs):
            named, orders = {**named, "orders": orders}, None  # a table of an input that is called so
        if named:
            inputs = self._by_name(named, (*inputs, left, right))
        if orders is not None and not hasattr(orders, "__len__"):
            raise DescriptionError(f"orders= takes one order per input, not {type(orders).__name__}")
        if len(inputs) == 1 and len(self.description.inputs) == 2:
            inputs = (*inputs, None)
        given = self._one_each(inputs or None, (left, right), "the join has {count} inputs, {given} were given")
        wrong = "orders= has {given} entries for {count} inputs"
        sequences = self._one_each(orders, (left_order, right_order), wrong)
        batches = repeatable(self.description, given)
        changes = self.memory.within(
            "taking in a micro-batch",
            self._operator,
            lambda: ingest(self.description, batches, sequences, self.kernels.dataframes),
        )
        now = int(time.time() * 1000) if clock_ms is None else whole_number("clock_ms", clock_ms)
        self._check_clock(now)
        batch = self._begin(changes, now, self._checked_watermark(watermark), started)
        try:
            return dataclasses.replace(batch, changelog=self._in_output_format(batch.changelog))
        except BaseException:
            self.discard()
            raise

    @property
    def _clock(self) -> int:
        """The clock of the micro-batch that is prepared, or was last; 0 before the first."""
        return self._clock_ms or 0

    def _check_clock(self, now: int) -> None:
        """Says, once, that the clock has been set back."""
        back = self._clock - now
        if self._clock_ms is not None and back > _SET_BACK_MS and not self._clock_was_set_back:
            self._clock_was_set_back = True
            _log.warning(
                "the clock was set back by %.1f s: rows that came before keep the times that they had, for a TTL and "
                "for processing time", back / 1e3,
            )  # fmt: skip

    def _begin(self, changes: tuple[Ingested, ...], now: int, given: Watermark, started: float) -> MicroBatch:
        self._clock_before, self._clock_ms = self._clock_ms, now
        self._prepared = True
        try:
            return self._prepare(changes, self._watermark(given), started)
        except BaseException:
            self.discard()
            raise

    def _in_output_format(self, changelog: Changelog) -> Changelog:
        """A changelog as what the engine gives; the fold takes it in with the next commit."""
        if self.kernels.gives_frames:
            assert self.kernels.dataframes is not None
            frame = self.kernels.frame(changelog) if isinstance(changelog, pa.Table) else changelog
            changelog = self.kernels.dataframes.as_dataframe(frame, self.description.output_schema)
        if self._fold is not None:
            self._fold.prepare(
                changelog if isinstance(changelog, pa.Table) else changelog.to_arrow(preserve_index=False)
            )
        return self._as_output(changelog)

    def _as_output(self, table: Changelog) -> Changelog:
        if not isinstance(table, pa.Table) or self._output == "arrow":
            return table
        if self._output == "cudf":
            assert self.kernels.dataframes is not None
            return self.kernels.dataframes.as_dataframe(self.kernels.frame(table), table.schema)
        if self._output == "pandas":
            return table.to_pandas()
        import polars as pl  # noqa: PLC0415 - optional

        return pl.from_arrow(table)

    def _one_each(self, given: Sequence[Any] | None, sides: tuple[Any, Any], wrong: str) -> list[Any]:
        """One for each input, however they were given.

        Args:
            given: by position; None for none.
            sides: the left's and the right's, of a join of two inputs.
            wrong: what to say of another number of them.
        """
        count = len(self.description.inputs)
        named = {side: one for side, one in enumerate(sides) if one is not None}
        if named and count != 2:
            raise DescriptionError(f"left= and right= are for a join of two inputs; this one has {count}")
        found = [None] * count if given is None else list(given)
        if len(found) != count:
            raise DescriptionError(wrong.format(given=len(found), count=count))
        for side, one in named.items():  # the left's by position and the right's by name is as good
            if found[side] is not None:
                raise DescriptionError("what is of an input was given twice, by position and by name")
            found[side] = one
        return found

    def _by_name(self, named: Mapping[str, InputBatch], others: Sequence[InputBatch]) -> tuple[InputBatch, ...]:
        """Orders batches that were given by the inputs' names like the inputs."""
        names = [source.name for source in self.description.inputs]
        for name in named:
            if name not in names:
                near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
                hint = f"; did you mean {near[0]}=? There are" if near else "; there are"
                raise DescriptionError(f"there is no input {name!r}{hint} {', '.join(names)}")
        if any(batch is not None for batch in others):
            raise DescriptionError(
                "changes were given by name, and by position or as left= and right= as well: one way is enough"
            )
        return tuple(named.get(name) for name in names)

    @staticmethod
    def _checked_watermark(watermark: Watermark) -> Watermark:
        """A watermark as the caller gave it, looked at."""
        if isinstance(watermark, tuple):
            if len(watermark) != 2:
                raise DescriptionError(f"watermark={watermark!r}: it is one number, or one per input")
            left, right = (None if w is None else whole_number("watermark", w) for w in watermark)
            return left, right
        return None if watermark is None else whole_number("watermark", watermark)

    def _watermark(self, given: Watermark) -> int | None:
        if given is None or not self.description.by_event_time:
            return self._operator.watermark_ms(self._clock)
        if isinstance(given, tuple):
            return None if given[0] is None or given[1] is None else min(given[0], given[1])
        return given

    def _prepare(self, changes: tuple[Ingested, ...], watermark: int | None, started: float) -> MicroBatch:
        ingested = time.perf_counter()
        self.memory.begin()
        operator, rows = self._operator, sum(c.kinds.size for c in changes)
        looked_up = dict(self.kernels.lookups)
        bad = [Beside(n, x.tagged, BAD_ROW_KIND) for n, x in enumerate(changes) if x.tagged is not None]

        def work() -> tuple[Output, Changelog, float]:
            made = operator.prepare(changes, self._clock, watermark)
            began = time.perf_counter()
            output = changelog(self.description, self.kernels, dataclasses.replace(made, beside=(*made.beside, *bad)))
            return made, output, (time.perf_counter() - began) * 1e3

        what = f"a micro-batch of {rows} changes"
        made, output, emit_ms = self.memory.within(what, operator, work, undo=operator.discard)
        self.memory.check(self._operator.tables)
        metrics: dict[str, int | float] = {}
        for name, change in zip(self.description.sides, changes, strict=True):
            metrics |= {f"{name}_rows_in": change.rows_in, f"{name}_bad_rows": change.bad_rows}
        for name, table in zip(self.description.state_names, self._operator.tables, strict=True):
            metrics |= {
                f"{name}_state_rows": table.live_after(),
                f"{name}_state_bytes": table.nbytes,
                f"{name}_cold_bytes": 0 if self.kernels.host is None else table.host_bytes,
                f"{name}_disk_bytes": table.disk_bytes,
            }
        metrics |= self.memory.moved()
        counts = [int(np.count_nonzero(made.kinds == code)) for code in range(len(_KINDS))]
        metrics |= {f"rows_out_{name}": count for name, count in zip(_KINDS, counts, strict=True)}
        metrics |= {f"lookups_{way}": count - looked_up[way] for way, count in self.kernels.lookups.items()}
        metrics |= made.metrics
        metrics["update_ms"] = metrics.get("update_ms", 0) + (ingested - started) * 1e3
        if "emit_ms" in metrics:
            metrics["emit_ms"] += emit_ms
        of_bad = np.zeros(sum(x.rows.num_rows for x in bad), np.int64)
        return MicroBatch(output, np.concatenate([made.sequence, of_bad]), metrics)

    def commit(self) -> None:
        """Make the prepared micro-batch final."""
        self._check_there()
        if not self._prepared:
            raise StateError("no micro-batch is prepared")
        self._prepared = False
        operator = self._operator
        self._whole("making a micro-batch final", lambda: operator.commit(self._clock))
        if self._fold is not None:
            self._fold.commit()
        self._settle()

    def _settle(self) -> None:
        """Make room after a commit. What fails there is said, and no error: the micro-batch has been applied."""
        try:
            self.memory.settle(self._operator.tables)
        except Exception as error:
            _log.warning("the micro-batch is final, but what tidies up after it failed: %s", error, exc_info=True)

    def discard(self) -> None:
        """Forget the prepared micro-batch; without one, nothing happens.

        Raises:
            StateError: memory ran out on the way, and nothing could be moved away. From here on the engine refuses
                everything until it is restored (`needs_restore`).
            MemoryError: likewise, of the host's memory.
        """
        self._check_there()
        if self._prepared:
            self._clock_ms = self._clock_before
        self._prepared = False
        if self._fold is not None:
            self._fold.discard()
        self._whole("taking back a micro-batch", self._operator.discard)
        self.memory.charge(self._operator.tables)

    def _whole(self, what: str, work: Callable[[], None]) -> None:
        """Do what leaves the state wrong if it is done in part."""
        self.needs_restore = True
        self.memory.within(what, self._operator, work)
        self.needs_restore = False

    # --- state -------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, pa.Table]:
        """The committed state, whichever backend holds it.

        Returns:
            For ``"left"`` and ``"right"``, or each of many inputs, the live rows, and behind their columns the
            association count as ``__count`` where one is kept and the last write as ``__written`` (ms) where a TTL asks
            for it; a column of the input may have such a name as well. With ``emit="at_end"`` all changes. For an
            interval join with what stands beside its rows, and under ``"time"`` its watermark. And what `table` gives.
        """
        state = whole(self.kept())
        if self._fold is not None and self._fold.known:
            state[FOLDED] = self._fold.rows()
        return state

    def kept(self) -> dict[str, Storable]:
        """Gives a snapshot by reference, for a state folder: what can be stored in pieces is not copied."""
        self._check_there()
        if self._prepared:
            raise StateError("commit or discard the prepared micro-batch before a snapshot")
        return self._operator.kept()

    def restore(self, state: Mapping[str, FromSnapshot]) -> None:
        """Take over a snapshot, of whichever backend, into an engine that has seen nothing yet or `needs_restore`.

        Raises:
            StateError: it is none of this join's; the engine is as fresh as it was.
        """
        if self.needs_restore and not self._closed:
            self._operator.close()
            self._operator = self._fresh_operator()
        else:
            self._check_there()
        if any(len(t) for t in self._operator.tables):
            raise StateError("restore needs a fresh engine")
        fold = self._fold
        try:
            with reading("snapshot of this join", StateError):
                own = {name: stored for name, stored in state.items() if name != FOLDED}
                self._check_snapshot(own)
                if fold is not None:
                    rows = state.get(FOLDED)
                    fold = fold.restored(rows if isinstance(rows, pa.Table) else None)
                self._operator.restore(own, lambda: self.memory.settle(self._operator.tables))
        except BaseException:
            self._operator = self._fresh_operator()
            raise
        self.needs_restore, self._fold = False, fold
        self._settle()

    def _check_snapshot(self, state: Mapping[str, FromSnapshot]) -> None:
        """Refuses a snapshot that lacks an input."""
        for name in self.description.state_names:
            if not isinstance(state.get(name), FromSnapshot):
                raise StateError(f"the snapshot lacks input '{name}'")

    def state_size(self) -> dict[str, int]:
        """Live rows and bytes of each input."""
        self._check_there()
        sizes = {}
        for name, table in zip(self.description.state_names, self._operator.tables, strict=True):
            sizes[f"{name}_rows"], sizes[f"{name}_bytes"] = table.live, table.nbytes
        return sizes

    def close(self) -> None:
        """Give back memory; the engine is of no use afterwards."""
        if self._closed:
            return
        self._closed = True
        self._operator.close()
        del self._operator
        self.memory.release()
        self.kernels.close()


@with_engine_options
def engine(
    *,
    backend: Backend = "auto",
    output: OutputFormat = "arrow",
    memory_limit: int | Budget | None = None,
    on: Any = None,
    **inputs: Any,
) -> JoinEngine:
    """Makes an engine for DataFrames, without Spark: its inputs by name, with the columns that they have.

    An input may be another engine that has seen nothing yet: then both operators run as one dataflow, which takes the
    other engine's inputs in its place, and changes of all operators are made final together::

        joined = gpu_ops.engine(orders=orders, prices=prices, on="order_id")
        totals = gpu_ops.engine(joined=joined, by="region", aggregates={"total": "sum(amount)"})
        totals.process(orders=orders, prices=prices)

    The options say which operator it is: with ``aggregates`` an aggregate of one input; with ``time`` and ``direction``
    or ``tolerance`` an ASOF join; with ``time``, ``lower`` and ``upper`` an interval join; of more than two inputs a
    multi-way join; else a regular join. An option that the operator does not read is refused.

    Args:
        backend: the processor that computes. ``"auto"``: the GPU where there is one. ``"cpu"``: the CPU. ``"gpu"``: the
            GPU, or an error.
        output: the package of changelogs and tables. ``"arrow"``: Arrow tables. ``"pandas"``, ``"polars"``, ``"cudf"``:
            DataFrames of these.
        memory_limit: the bytes that state may take, or a `Budget`, see `JoinEngine`.
        on: the key: ``"k"``, ``["k", ("left_k", "right_k")]``, or None.
        inputs: the inputs, by name: DataFrames of pandas, polars or cuDF, Arrow tables, whose columns count and whose
            rows do not, ``gpu_ops.Input.of(frame, row_kind=..., unique_key=...)``, or an engine; and the options
            ``how``, ``where``, ``suffixes``, ``emit``, ``null_safe``, ``null_aware``, ``time``, ``lower``, ``upper``,
            ``lower_inclusive``, ``upper_inclusive``, ``keyed``, ``late``, ``min_cleanup``, ``timestamp``,
            ``direction``, ``tolerance``, ``allow_exact_matches``, ``aggregates``, ``by``, ``window_end`` and
            ``session_gap``, which mean what they mean in `gpu_ops.join`, `gpu_ops.interval_join`, `gpu_ops.asof_join`
            and `gpu_ops.aggregate`; ``how`` also as pandas and Spark spell it.

    Raises:
        DescriptionError: the options describe no operator, or one is not read by it.
        BackendError: as `JoinEngine`.

    Example:
        >>> orders = pa.table({"id": [1, 2], "amount": [10, 20]})
        >>> payments = pa.table({"id": [1], "paid": [4]})
        >>> engine = gpu_ops.engine(orders=orders, payments=payments, on="id", how="left", output="pandas")
        >>> _ = engine.process(orders=orders, payments=payments)
        >>> engine.table().sort_values("id")
           id  amount  paid
        0   1      10   4.0
        1   2      20   NaN
    """
    bare = {
        x
        for x, y in inputs.items()
        if not (isinstance(y, Input | pa.Schema | JoinEngine) or hasattr(y, "__arrow_c_stream__"))
    }
    options = {name: inputs.pop(name) for name in list(inputs) if name in ENGINE_OPTIONS and name in bare}
    for name in inputs:
        if name in bare:
            check_engine_option(name)
    taken = set(inspect.signature(JoinEngine.prepare).parameters) - {"orders"}
    for number, name in enumerate(inputs):
        if name in taken and name != ("left", "right", None)[min(number, 2)]:
            raise DescriptionError(f"an input cannot be called {name!r}, which has a meaning in process()")
    below = {name: one.description for name, one in inputs.items() if isinstance(one, JoinEngine)}
    for name, under in below.items():
        if any(len(table) for table in inputs[name]._operator.tables):
            raise DescriptionError(f"the engine {name!r} holds rows: a dataflow begins with engines that hold none")
        inputs[name] = under.as_input(name)
    description = described(inputs, {"on": on, **options})
    description = Dataflow.over(description, below) if below else description
    return JoinEngine(description, backend, memory_limit=memory_limit, output=output, fold=True)
