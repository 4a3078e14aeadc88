"""The command line: what it prints, and how it fails."""

import importlib.util
import re
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from rich.console import Console
from typer.testing import CliRunner

import gpu_ops
from gpu_ops import cli
from gpu_ops.descriptions.inputs import Input
from gpu_ops.descriptions.join import Join
from gpu_ops.descriptions.keys import Key
from gpu_ops.errors import StateError
from gpu_ops.join_engine import JoinEngine
from gpu_ops.memory import size_text
from gpu_ops.spark.server import inspection
from gpu_ops.spark.server.partition import stored_state
from gpu_ops.spark.wire.command import Wire
from gpu_ops.state.durable import PartitionLog, Record
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import Manifest, ensure
from gpu_ops.state.pieces import whole

ORDERS = pa.schema([("order_id", pa.int64()), ("movie_id", pa.int64())])
PRICES = pa.schema([("order_id", pa.int64()), ("set_price", pa.int64())])
JOIN = Join(
    "left",
    Input("orders", ORDERS, unique_key=("order_id",), row_kind="op", ttl_ms=3_600_000),
    Input("prices", PRICES),
    (Key("order_id", "order_id", using=True),),
)
WIRE = Wire(
    "__side",
    "__order",
    (("order_id", "order_id", "c0"), ("movie_id", "set_price", "c1"), ("op", None, "c2")),
)
MANIFEST = Manifest(JOIN.to_json(), 3, "query-7")


def record(first, count, kind="+I"):
    """A micro-batch of orders and no prices."""
    numbers = list(range(first, first + count))
    order = pa.array(range(count), pa.int64())
    columns = {"__side": pa.array([0] * count, pa.int8()), "__order": order, "c0": numbers, "c1": numbers}
    return Record(pa.table({**columns, "c2": [kind] * count}), 1000, WIRE.to_json())


def run(*arguments, monkeypatch, capsys):
    """Runs `main` as the shell does; gives exit status, standard output and standard error."""
    monkeypatch.setattr(sys, "argv", ["gpu-join", *arguments])
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(cli.supervision, "supervised", lambda: True)  # in this process
    status = 0
    try:
        cli.main()
    except SystemExit as error:
        status = error.code or 0
    out = capsys.readouterr()
    return status, out.out, out.err


COMMANDS = ("demo", "run", "plan-change", "change", "example", "inspect", "rescale", "health", "bench")


@pytest.fixture
def command(monkeypatch, capsys):
    return lambda *arguments: run(*arguments, monkeypatch=monkeypatch, capsys=capsys)


def test_help_names_what_there_is():
    shown = CliRunner().invoke(cli.app, ["--help"])
    assert shown.exit_code == 0
    assert all(re.search(rf"^\s+{name}\s", shown.output, re.MULTILINE) for name in COMMANDS)


def test_help_says_what_each_command_is_for_in_a_line():
    shown = CliRunner().invoke(cli.app, ["--help"], env={"COLUMNS": "80"}).output
    commands = shown.partition("Commands:")[2].strip().splitlines()
    assert [line.split()[0] for line in commands] == [*COMMANDS[:6], "top", *COMMANDS[6:]]
    assert not [line for line in commands if "..." in line]


def test_help_of_a_wheel_names_what_is_in_it(tmp_path):
    copy = tmp_path / "site-packages" / "gpu_ops" / "cli.py"
    copy.parent.mkdir(parents=True)
    copy.write_text(Path(cli.__file__).read_text())
    spec = importlib.util.spec_from_file_location("cli_of_a_wheel", copy)
    wheel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wheel)
    shown = CliRunner().invoke(wheel.app, ["--help"]).output
    there = [name for name in COMMANDS if re.search(rf"^\s+{name}\s", shown, re.MULTILINE)]
    assert there == [name for name in COMMANDS if name != "bench"]


def test_version(command):
    status, out, _ = command("--version")
    assert status == 0
    assert out == f"gpu-join {gpu_ops.__version__}\n"


def test_a_command_that_there_is_not(command):
    status, _, err = command("repair")
    assert status == 2
    assert "No such command" in err


# --- inspect ---------------------------------------------------------------------------------------


@pytest.fixture
def state(tmp_path):
    """A state folder with three partitions cut, two in use: one with a snapshot, one without."""
    files = Files.at(str(tmp_path / "state"))
    ensure(files, MANIFEST, create=True)
    engine = JoinEngine(JOIN, "cpu")
    orders = pa.table({"op": ["+I"] * 3, "order_id": [1, 2, 3], "movie_id": [1, 2, 3]})
    engine.process(orders, pa.table({"order_id": [1, 9], "set_price": [40, 50]}))
    log = PartitionLog(files, MANIFEST, 0)
    log.write_snapshot(5, engine.snapshot(), 1000)
    for batch, kind in ((3, "+I"), (5, "+I"), (6, "-D")):  # 3 is left over from before the snapshot
        log.write_record(batch, record(100, 1234 if batch == 5 else 34, kind))
    PartitionLog(files, MANIFEST, 1).write_record(0, record(5000, 1234))
    return files


def test_inspect(state, command):
    status, out, err = command("inspect", state.location)
    assert (status, err) == (0, "")
    assert "left join on order_id = order_id, emit per_batch" in out
    assert "query query-7" in out
    assert "3,600 s" in out
    assert "set_price int64" in out
    assert "1 of 3 partitions hold nothing yet" in out
    cells = [line.split() for line in out.splitlines() if re.match(r"\s+(\d|all)\s\s", line)]
    rows = {line[0]: line for line in cells if line[0] in ("0", "1", "all")}
    assert rows["0"][1:3] == ["7", "5"]
    assert rows["0"][5:7] == ["1,203", "2"]
    assert rows["0"][-1] == "1,268"
    assert rows["1"][1:3] == ["1", "none"]
    assert rows["1"][-1] == "1,234"
    assert rows["all"][-1] == "2,502"


def test_inspect_shows_the_rows_there_are_not_those_of_the_snapshot(state):
    """It showed none while the log held some, and one that the log deletes."""
    found = inspection.read_partition(state, MANIFEST, 1, rows=True)
    assert (found.snapshot, found.rows) == (None, (1234, 0))
    log = PartitionLog(state, MANIFEST, 1)
    with stored_state(state, MANIFEST, 1).held_at(1) as held:
        log.write_snapshot(1, whole(held.tables), 1000)
    log.write_record(1, record(5000, 1233, "-D"))
    found = inspection.read_partition(state, MANIFEST, 1, rows=True)
    assert (found.snapshot, found.version, found.rows) == (1, 2, (1, 0))


def test_inspect_without_rows_reads_no_file(state, command):
    for path in Path(state.location).rglob("*.arrow"):
        path.write_bytes(b"damaged")
    status, out, _ = command("inspect", state.location, "--no-count")
    assert status == 0
    assert "changes" not in out
    status, _, err = command("inspect", state.location)
    assert status == 1
    assert "cut short" in err


def test_inspect_rows(state, command):
    status, _, err = command("inspect", state.location, "--rows", "orders")
    assert status == 1
    assert "have no version in common: [7, 1, 0]" in err
    for path in (Path(state.location) / "p" / "0").iterdir():
        path.unlink()
    for partition in (0, 2):
        PartitionLog(state, MANIFEST, partition).write_record(0, record(100, 0))
    status, out, err = command("inspect", state.location, "--rows", "orders", "--version", "1", "--limit", "2")
    lines = out.splitlines()
    assert (status, err) == (0, "")
    assert lines[0] == "left, version 1"
    assert lines[1].split() == ["order_id", "movie_id", "_matches", "_written", "_partition", "_version"]
    assert len(lines) == 2 + 2 + 1
    assert lines[-1].startswith("2 of ")
    status, _, err = command("inspect", state.location, "--rows", "payments")
    assert status == 1
    assert "input='payments' names none" in err


def test_inspect_changes_nothing(state, command):
    (Path(state.location) / "p" / "0" / "half.arrow.123.tmp").write_bytes(b"a running query writes this")
    before = sorted((path, path.stat().st_mtime_ns) for path in Path(state.location).rglob("*"))
    assert command("inspect", state.location)[0] == 0
    assert sorted((path, path.stat().st_mtime_ns) for path in Path(state.location).rglob("*")) == before


def test_inspect_while_the_query_compacts(state, monkeypatch):
    """Files that a snapshot has replaced between listing and reading are no damage."""
    original = PartitionLog.read_record

    def read(log, batch):
        if not log.stored().snapshots.keys() & {7}:
            log.write_snapshot(7, JoinEngine(JOIN, "cpu").snapshot(), 1000)
            log.prune(7, log.stored())
        return original(log, batch)

    monkeypatch.setattr(PartitionLog, "read_record", read)
    found = inspection.read_partition(state, MANIFEST, 0, rows=True)
    assert (found.version, found.snapshot, found.rows, found.records) == (7, 7, (0, 0), 0)


def test_inspect_a_record_that_is_really_missing(state, monkeypatch):
    monkeypatch.setattr(PartitionLog, "read_record", lambda *_: (_ for _ in ()).throw(StateError("gone for good")))
    with pytest.raises(StateError, match="gone for good"):
        inspection.describe(state.location, Console())


@pytest.mark.parametrize("place", ["", "nowhere", "file"])
def test_inspect_no_state_folder(tmp_path, command, place):
    (tmp_path / "file").write_text("x")
    status, out, err = command("inspect", str(tmp_path / place))
    assert (status, out) == (1, "")
    assert err.startswith("gpu-join: ")
    assert len(err.splitlines()) == 1


def test_inspect_an_unknown_file_system(command):
    status, _, err = command("inspect", "nosuch://bucket/state")
    assert status == 1
    assert "file://, hdfs://, s3:// or gs://" in err


def test_readable():
    sizes = [0, 1023, 1024, 1536, 2**20, 5 * 2**30, 3 * 2**40]
    shown = ["0 B", "1023 B", "1.0 KiB", "1.5 KiB", "1.0 MiB", "5.0 GiB", "3.0 TiB"]
    assert [size_text(size) for size in sizes] == shown


# --- health ----------------------------------------------------------------------------------------


def test_health_says_what_it_did(command):
    status, out, _ = command("health", "--backend", "cpu")
    assert status == 0
    assert re.fullmatch(r"ok: joined 4 rows on the cpu in \d+ ms \(.*\)\n", out), out


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    folder = tmp_path / "benchmarks"
    (folder / "peer").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "peer" / "__init__.py").touch()
    (folder / "library.py").write_text("x = 1\n")
    for path in ("speed.py", "peer/run.py", "__main__.py"):
        (folder / path).write_text(
            "import pathlib, sys\nif __name__ == '__main__':\n"
            "    pathlib.Path('ran').write_text(' '.join([__spec__.name, *sys.argv[1:]]))\n    sys.exit(3)\n"
        )
    monkeypatch.setattr(cli, "_ROOT", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "ran"),
    [
        (["speed"], "benchmarks.speed"),
        (["peer"], "benchmarks.peer.run"),
        (["speed", "--rows", "5"], "benchmarks.speed --rows 5"),
        (["speed", "--", "--help"], "benchmarks.speed --help"),
    ],
)
def test_bench_runs_the_module(checkout, command, arguments, ran):
    status, _, _ = command("bench", *arguments)
    assert status == 3, "its exit status"
    assert (checkout / "ran").read_text() == ran


def test_bench_unknown(checkout, command):
    status, _, err = command("bench", "library")
    assert status == 1
    assert "no benchmark 'library'; there are peer, speed" in err


def test_bench_outside_a_checkout(tmp_path, command, monkeypatch):
    monkeypatch.setattr(cli, "_ROOT", tmp_path)
    status, _, err = command("bench", "speed")
    assert status == 1
    assert "source checkout" in err


# --- demo ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("right", [True, False])
def test_demo_exit_status(command, monkeypatch, tmp_path, right):
    runner = pytest.importorskip("gpu_ops.demo.runner")
    asked = []
    monkeypatch.setattr(runner, "run", lambda console, options: asked.append(options) or right)
    keep = tmp_path / "new"
    status, _, _ = command("demo", "--scale", "0.5", "--rows", "5000", "--backend", "cpu", "--keep", str(keep))
    assert status == (0 if right else 1)
    assert asked == [runner.Options(scale=0.5, rows=5000, backend="cpu", keep=keep)]


def test_demo_keeps_what_is_there(command, tmp_path):
    (tmp_path / "mine").touch()
    status, _, err = command("demo", "--keep", str(tmp_path))
    assert status == 1
    assert "not empty" in err


def test_demo_says_what_it_lacks(command, monkeypatch):
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda _: None)
    status, _, err = command("demo")
    assert status == 1
    assert "needs duckdb and pyspark" in err
    assert "pip install 'gpu-join[demo]'" in err


def test_demo_without_a_gpu(command, monkeypatch):
    runner = pytest.importorskip("gpu_ops.demo.runner")
    monkeypatch.setattr(runner, "gpu_available", lambda: (False, "there is no card"))
    status, _, err = command("demo", "--backend", "gpu")
    assert status == 1
    assert "no GPU answers: there is no card" in err


@pytest.mark.parametrize("arguments", [["--scale", "0"], ["--rows", "5"], ["--backend", "abacus"]])
def test_demo_refuses(command, arguments):
    assert command("demo", *arguments)[0] == 2


def test_run_serves_metrics_where_it_is_told(command, monkeypatch):
    runner, asked = pytest.importorskip("gpu_ops.jobs.runner"), []

    def run(job, console, *, once, show, views=()):
        asked.append(job.spark)
        return runner.Outcome()

    monkeypatch.setattr(runner, "run", run)
    job = Path(__file__).resolve().parents[1] / "examples" / "job.sql"
    assert command("run", str(job), "--metrics-port", "9095", "--conf", "spark.x=1")[0] == 0
    assert asked == [{"spark.x": "1", "spark.gpu_ops.prometheus.port": "9095"}]


def test_run_without_the_package_for_metrics_starts_no_spark(command, monkeypatch):
    """It said so when Spark had started, and the first join was made."""
    pytest.importorskip("pyspark")
    from pyspark.sql import SparkSession

    def never(*_):
        pytest.fail("Spark starts")

    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setattr(SparkSession, "getActiveSession", staticmethod(lambda: None))
    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", never)
    job = Path(__file__).resolve().parents[1] / "examples" / "job.sql"
    for given in (["--metrics-port", "9095"], ["--conf", "spark.gpu_ops.prometheus.port=h:9095", "--explain"]):
        status, out, said = command("run", str(job), *given)
        assert (status, out) == (1, "")
        assert "metrics for Prometheus need prometheus-client: pip install 'gpu-join[metrics]'" in said
    status, _, said = command("run", str(job), "--metrics-port", "none")
    assert status == 1
    assert "spark.gpu_ops.prometheus.port" in said


def test_top_says_how_a_query_serves_metrics(command):
    pytest.importorskip("prometheus_client")
    for address in ("1", "127.0.0.1:1", "http://127.0.0.1:1/metrics"):
        status, _, err = command("top", address, "--once")
        assert status == 1
        assert re.search(r"nothing serves metrics at http://127\.0\.0\.1:1/metrics: .*--metrics-port PORT", err)
