"""The command line: ``gpu-join``."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Final, Literal, NoReturn

import typer
from rich.console import Console

from gpu_ops import __version__
from gpu_ops.errors import GpuJoinError
from gpu_ops.jobs import supervision

# What a command needs is imported in it: `--help` answers at once, `inspect` does without Spark.

app = typer.Typer(
    name="gpu-join",
    help="Streaming joins for PySpark over inputs that are updated and deleted, with Flink's semantics.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

BackendOption = Literal["auto", "cpu", "gpu"]
TpchQuery = Literal["q3", "q4", "q5", "q10", "q12", "q13", "q18"]

_ROOT: Final = Path(__file__).resolve().parent.parent
_DEMO_NEEDS: Final = ("duckdb", "pyspark")
_WITH_SPARK: Final = (["demo"], ["run"], ["plan-change"], ["change"])


def main() -> None:
    """Runs the command line; errors of this pack are one line on standard error, and exit status 1.

    What starts Spark runs in a child, see `gpu_ops.jobs.supervision`.
    """
    arguments = sys.argv[1:]
    try:
        if not supervision.supervised() and arguments[:1] in _WITH_SPARK and "--help" not in arguments:
            raise SystemExit(supervision.run(arguments))
        app()
    except GpuJoinError as error:
        _fail(str(error))


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"gpu-join {__version__}")
        raise typer.Exit


@app.command()
def demo(
    scale: Annotated[
        float | None,
        typer.Option(min=0.001, show_default="0.1", help="TPC-H scale factor; 0.1 makes a million changes."),
    ] = None,
    rows: Annotated[int | None, typer.Option(min=1000, help="About how many changes to stream.")] = None,
    backend: Annotated[BackendOption, typer.Option(help="Where to join.")] = "auto",
    keep: Annotated[
        Path | None,
        typer.Option(file_okay=False, help="Empty folder for inputs, changelog, state, checkpoint."),
    ] = None,
    query: Annotated[TpchQuery | None, typer.Option(help="One of TPC-H's queries instead, as a live view.")] = None,
) -> None:
    """Join streams in Spark, stop half-way, resume, check every row.

    First a join small enough to follow by eye, then TPC-H's orders LEFT JOIN lineitem as streams of inserts, updates
    and deletes, checked with DuckDB. With --query one of TPC-H's queries, shown while it changes. Exit status 1 when a
    row is wrong.
    """
    missing = [name for name in _DEMO_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        _fail(f"the demo needs {' and '.join(missing)}: pip install 'gpu-join[demo]'")
    if keep is not None and keep.is_dir() and any(keep.iterdir()):
        _fail(f"--keep {keep}: the folder is not empty")
    from gpu_ops.demo import runner  # noqa: PLC0415
    from gpu_ops.demo.tpch import DataError  # noqa: PLC0415

    console = Console(highlight=False)
    options = runner.Options(scale, rows, backend, keep)
    try:
        right = runner.run(console, options) if query is None else runner.run_query(console, query, options)
    except DataError as error:
        _fail(str(error))
    if not right:
        raise typer.Exit(1)


@app.command()
def run(  # noqa: PLR0917 (options: typer passes them by name)
    file: Annotated[Path, typer.Argument(help="The job, a .sql file.", metavar="JOB")],
    views: Annotated[
        list[str] | None,
        typer.Argument(help="With --show: the views or sinks to show; all sinks by default.", metavar="[VIEW]..."),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Take what there is and end; else go on until Ctrl-C.")] = False,
    state: Annotated[str | None, typer.Option(help="State folder: a path, or a URI.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Spark's checkpoint folder.")] = None,
    master: Annotated[
        str | None, typer.Option(help="Spark's master, such as local[2].", show_default="local[*]")
    ] = None,
    backend: Annotated[BackendOption | None, typer.Option(help="Where to join.")] = None,
    trigger: Annotated[str | None, typer.Option(help="How often a micro-batch begins, such as '1 second'.")] = None,
    packages: Annotated[str | None, typer.Option(help="Maven packages for Spark, comma-separated.")] = None,
    conf: Annotated[list[str] | None, typer.Option(help="A Spark setting, name=value; as often as needed.")] = None,
    metrics_port: Annotated[
        str | None, typer.Option(help="Serve metrics for Prometheus and `gpu-join top` here: PORT, or HOST:PORT.")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Print what would run, and run nothing.")] = False,
    show: Annotated[
        bool, typer.Option("--show", help="Show the result while it changes, and write and keep nothing.")
    ] = False,
) -> None:
    """Run a job: sources, queries and sinks in one SQL file.

    The SQL is Flink's. What is given here goes before what the job sets. Ctrl-C ends it; the same command goes on
    from there.
    """
    if importlib.util.find_spec("pyspark") is None:
        _fail("jobs need PySpark: pip install 'gpu-join[spark]'")
    from gpu_ops.jobs import runner  # noqa: PLC0415
    from gpu_ops.jobs.job import amended, load  # noqa: PLC0415

    given = {"state": state, "checkpoint": checkpoint, "master": master, "backend": backend, "trigger": trigger}
    settings = {name: value for name, value in given.items() if value is not None}
    more = [*(conf or []), *([] if metrics_port is None else [f"spark.gpu_ops.prometheus.port={metrics_port}"])]
    job, console = amended(load(file), settings, packages, more), Console(highlight=False)
    if explain:
        console.print(runner.explain(job, console), markup=False, soft_wrap=True)
        return
    if views and not show:
        _fail(f"{' '.join(views)}: names of views are for --show")
    done = runner.run(job, console, once=once, show=show, views=views or ())
    if show and done.interrupted:
        raise typer.Exit(supervision.INTERRUPTED)


JobFile = Annotated[Path, typer.Argument(help="The new job, a .sql file.", metavar="JOB")]
ReadAgain = Annotated[
    list[str] | None,
    typer.Option(help="A table whose source still has everything, and may be read again; as often as needed."),
]
MissingOption = Annotated[
    Literal["refuse", "null"],
    typer.Option(help="What becomes of a column that the state does not hold: null where nothing else is said."),
]
Master = Annotated[str | None, typer.Option(help="Spark's master, such as local[2].", show_default="local[*]")]
Packages = Annotated[str | None, typer.Option(help="Maven packages for Spark, comma-separated.")]
Conf = Annotated[list[str] | None, typer.Option(help="A Spark setting, name=value; as often as needed.")]


@app.command("plan-change")
def plan_change(
    old_state: Annotated[str, typer.Argument(help="State folder of the old job.", metavar="STATE")],
    file: JobFile,
    *,
    read_again: ReadAgain = None,
    missing: MissingOption = "refuse",
    master: Master = None,
    packages: Packages = None,
    conf: Conf = None,
) -> None:
    """Tell what a change of a job's query would take.

    Nothing is changed: what becomes of each operator, and where the rows of each table come from.
    """
    from gpu_ops.jobs import changed  # noqa: PLC0415
    from gpu_ops.jobs.job import amended, load  # noqa: PLC0415

    settings = {} if master is None else {"master": master}
    job, console = amended(load(file), settings, packages, conf or []), Console(highlight=False)
    described = changed.plan(job, console, old_state, read_again=read_again or (), missing=missing)
    console.print(str(described), markup=False, soft_wrap=True)


@app.command()
def change(
    file: JobFile,
    *,
    old_state: Annotated[str | None, typer.Option(help="State folder of the old job.")] = None,
    old_checkpoint: Annotated[str | None, typer.Option(help="Checkpoint of the old job.")] = None,
    state: Annotated[str | None, typer.Option(help="State folder of the new job, else what it sets.")] = None,
    checkpoint: Annotated[str | None, typer.Option(help="Checkpoint of the new job, else what it sets.")] = None,
    read_again: ReadAgain = None,
    missing: MissingOption = "refuse",
    empty_sink: Annotated[bool, typer.Option("--empty-sink", help="The sink is new, and gets all rows.")] = False,
    undo: Annotated[bool, typer.Option("--undo", help="Go back: JOB is the old one, which was changed.")] = False,
    master: Master = None,
    packages: Packages = None,
    conf: Conf = None,
) -> None:
    """Change a job's query, which keeps its state.

    The old job must be stopped. The new job's state and checkpoint are new folders; the sink gets the difference of the
    results. Then run it.
    """
    from gpu_ops.jobs import changed  # noqa: PLC0415
    from gpu_ops.jobs.job import amended, load  # noqa: PLC0415

    given = {"state": state, "checkpoint": checkpoint, "master": master}
    settings = {name: value for name, value in given.items() if value is not None}
    job, console = amended(load(file), settings, packages, conf or []), Console(highlight=False)
    if undo:
        changed.undo(job, console)
        console.print("the sink has the old result: run the old job again", markup=False)
        return
    if old_state is None or old_checkpoint is None:
        _fail("change needs --old-state and --old-checkpoint, the folders of the old job")
    done = changed.change(
        job, console, old_state, old_checkpoint, read_again=read_again or (), missing=missing, empty_sink=empty_sink
    )
    console.print(str(done), markup=False, soft_wrap=True)
    console.print(f"done: state in {job.state}; run the new job, which goes on from here", markup=False, soft_wrap=True)


@app.command()
def example() -> None:
    """Print a job that needs no files. Then: gpu-join example > job.sql; gpu-join run job.sql --show."""
    typer.echo((Path(__file__).parent / "jobs" / "example.sql").read_text(), nl=False)


@app.command()
def inspect(
    state: Annotated[str, typer.Argument(help="State folder: a path, or a URI (file, hdfs, s3, gs).", metavar="STATE")],
    count: Annotated[
        bool, typer.Option("--count/--no-count", help="Count live rows, which replays the log; else sizes alone.")
    ] = True,
    rows: Annotated[str | None, typer.Option(help="An input whose rows are shown instead.", metavar="INPUT")] = None,
    version: Annotated[int | None, typer.Option(min=0, help="With --rows: another version than the last.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="With --rows: how many.")] = 20,
) -> None:
    """Show a state folder: whose it is, versions, sizes, rows."""
    from gpu_ops.spark.server.inspection import describe, show_rows  # noqa: PLC0415

    console = Console(highlight=False)
    if rows is None:
        describe(state, console, rows=count)
    else:
        show_rows(state, console, rows, version=version, limit=limit)


@app.command()
def top(
    address: Annotated[
        str, typer.Argument(help="Where a query serves its metrics: PORT, HOST:PORT, or a URL.", metavar="ADDRESS")
    ] = "9095",
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table and end; else until Ctrl-C.")] = False,
) -> None:
    """Watch the joins of a running query: rows, state, latency, lag. It serves them with --metrics-port."""
    from gpu_ops.spark.metrics.live import watch  # noqa: PLC0415

    host = f"127.0.0.1:{address}" if address.isdecimal() else address
    url = host if "://" in host else f"http://{host}/metrics"
    with contextlib.suppress(KeyboardInterrupt):
        watch(url, Console(highlight=False), every_s=every, once=once)


@app.command()
def rescale(
    state: Annotated[str, typer.Argument(help="State folder: a path, or a URI (file, hdfs, s3, gs).", metavar="STATE")],
    partitions: Annotated[int, typer.Option(min=1, help="How many there are to be.")],
    memory: Annotated[
        str | None, typer.Option(help="For the state of a partition, such as 4g: more goes to local disk.")
    ] = None,
) -> None:
    """Cut a state folder into another number of partitions. Its query must be stopped; then it goes on from here."""
    from gpu_ops.spark.server.rescale import rescale as cut  # noqa: PLC0415
    from gpu_ops.spark.server.server import server_budget  # noqa: PLC0415

    budget = server_budget(None, memory)
    done = cut(state, partitions, lambda text: typer.echo(text, err=True), budget=budget)
    rows = f"{sum(done.rows):,} rows, {min(done.rows):,} to {max(done.rows):,} in a partition"
    typer.echo(f"{done.before} partitions became {done.after}: {rows}, after {done.version} micro-batches")


@app.command()
def health(backend: Annotated[BackendOption, typer.Option(help="Where to join.")] = "auto") -> None:
    """Join one micro-batch, to see that the engine works here. Exit status 1 where it does not."""
    import time  # noqa: PLC0415

    import pyarrow as pa  # noqa: PLC0415

    from gpu_ops import Input, Join, JoinEngine, Key  # noqa: PLC0415

    schema = pa.schema([("k", pa.int64())])
    engine = JoinEngine(
        Join("left", Input("left", schema), Input("right", schema), (Key("k", "k", using=True),)), backend
    )
    began = time.perf_counter()
    rows = engine.process(pa.table({"k": [1, 2]}), pa.table({"k": [2, 3]}))
    took = time.perf_counter() - began
    if sorted(rows["k"].to_pylist()) != [1, 2]:
        _fail(f"wrong answer: {rows.to_pylist()}")
    typer.echo(f"ok: joined 4 rows on the {engine.backend} in {took * 1e3:.0f} ms ({engine.backend_reason})")


@app.command(
    hidden=not (_ROOT / "benchmarks").is_dir(),
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def bench(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="Which one; behind it, after --, its own options.", metavar="NAME")],
) -> None:
    """Run a benchmark of this source checkout. A wheel has none, and does not list this."""
    folder = _ROOT / "benchmarks"
    if not (folder / "__init__.py").is_file():
        _fail("the benchmarks are part of the source checkout, not of the package: run this from there")
    known = benchmarks(folder)
    if name not in known:
        _fail(f"no benchmark {name!r}; there are {', '.join(known)}")
    command = [sys.executable, "-m", known[name], *context.args]
    raise typer.Exit(subprocess.run(command, cwd=_ROOT, check=False).returncode)  # noqa: S603 (a module of ours)


def benchmarks(folder: Path) -> dict[str, str]:
    """The modules below a folder that can be run, by name; ``x.py`` and ``x/run.py`` are both called x."""
    found = {}
    for path in sorted(folder.rglob("[!_]*.py")):
        if re.search(r"^if __name__ == .__main__.:", path.read_text(), re.MULTILINE):
            parts = path.relative_to(folder.parent).with_suffix("").parts
            name = ".".join(parts[1:-1] if parts[-1] == "run" else parts[1:])
            found[name] = ".".join(parts)
    return found


def _fail(message: str) -> NoReturn:
    Console(stderr=True, highlight=False).print(f"gpu-join: {message}", style="red", markup=False, soft_wrap=True)
    raise SystemExit(1)


if __name__ == "__main__":
    main()
