"""JoinEngine: an operator's engine for notebooks: DataFrames in and out, inputs by name, and a table of the result."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy.typing as npt
import pyarrow as pa

from gpu_ops.backends import Backend
from gpu_ops.descriptions.arguments import ENGINE_OPTIONS, check_engine_option, described, with_engine_options
from gpu_ops.descriptions.changelog import FOLDED
from gpu_ops.descriptions.dataflow import Dataflow
from gpu_ops.descriptions.description import Description, line
from gpu_ops.descriptions.inputs import Input
from gpu_ops.display import Explanation, Tables, changes_of, lookups_text, operator_box, source_box
from gpu_ops.errors import BackendError, DescriptionError, StateError
from gpu_ops.fields import reading
from gpu_ops.kernels import Probe
from gpu_ops.memory import Budget
from gpu_ops.operator_engine import InputBatch, MicroBatch, OperatorEngine, Watermark
from gpu_ops.output import Changelog, Fold
from gpu_ops.state.pieces import FromSnapshot

OutputFormat = Literal["arrow", "cudf", "pandas", "polars"]
"""As what an engine gives its changelogs: Arrow tables, or DataFrames of one of these."""


class JoinEngine(OperatorEngine):
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
        if output not in get_args(OutputFormat):
            raise DescriptionError(f"output={output!r}; it is one of {', '.join(get_args(OutputFormat))}")
        super().__init__(description, backend, memory_limit=memory_limit, tiny=tiny, backlog=backlog, probe=probe)
        self._output = output
        if output == "cudf":
            self._give_frames()
        self._fold = Fold(description.output_schema) if fold else None

    def _give_frames(self) -> None:
        """Have changelogs made as DataFrames, if they can be."""
        frames, cpu = self.kernels.dataframes, f"the GPU backend is needed, this is the CPU's ({self.backend_reason})"
        problem = cpu if frames is None else frames.lacks(self.description.output_schema)
        if problem is not None:
            self.close()
            raise BackendError(f"output='cudf': {problem}")
        self.kernels.gives_frames = True

    def process(self, *inputs: InputBatch, **options: Any) -> Changelog:
        """Apply one micro-batch and return its changelog; arguments as `prepare`."""
        result = self.prepare(*inputs, **options)
        self.commit()
        return result.changelog

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
        if hasattr(orders, "__arrow_c_stream__") and any(source.name == "orders" for source in self.description.inputs):
            named, orders = {**named, "orders": orders}, None  # a table of an input that is called so
        if named:
            inputs = self._by_name(named, (*inputs, left, right))
        if orders is not None and not hasattr(orders, "__len__"):
            raise DescriptionError(f"orders= takes one order per input, not {type(orders).__name__}")
        if len(inputs) == 1 and len(self.description.inputs) == 2:
            inputs = (*inputs, None)
        batches = self._one_each(inputs or None, (left, right), "the join has {count} inputs, {given} were given")
        wrong = "orders= has {given} entries for {count} inputs"
        sequences = self._one_each(orders, (left_order, right_order), wrong)
        if self._fold is not None:  # before anything changes, so that nothing of a commit can fail or be interrupted
            self._fold.settle()
        return self.prepare_batches(batches, sequences, clock_ms=clock_ms, watermark=watermark, backlog=backlog)

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

    def _emitted(self, changelog: Changelog) -> Changelog:
        """A changelog in the output format; the fold takes it in with the next commit."""
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

    def _committed(self) -> None:
        if self._fold is not None:
            self._fold.commit()

    def _discarded(self) -> None:
        if self._fold is not None:
            self._fold.discard()

    def snapshot(self) -> dict[str, pa.Table]:
        """The committed state as of `OperatorEngine`, and what `table` gives."""
        state = super().snapshot()
        if self._fold is not None and self._fold.known:
            state[FOLDED] = self._fold.rows()
        return state

    def restore(self, state: Mapping[str, FromSnapshot]) -> None:
        """Take over a snapshot as an `OperatorEngine` does, and the rows of `table` in it.

        Raises:
            StateError: it is none of this join's; the engine is as fresh as it was.
        """
        fold = self._fold
        with reading("snapshot of this join", StateError):
            own = {name: stored for name, stored in state.items() if name != FOLDED}
            if fold is not None:
                rows = state.get(FOLDED)
                fold = fold.restored(rows if isinstance(rows, pa.Table) else None)
        super().restore(own)
        self._fold = fold


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
