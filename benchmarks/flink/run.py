"""Runs `orders LEFT JOIN prices` on Flink over the files of `benchmarks.changes`, and checks what comes out.

    python -m benchmarks.flink.run DIRECTORY --source sql lean --parallelism 1 2 --mini-batch off on --repeat 3

Flink comes from the wheel `apache-flink-libraries` on PyPI (about 330 MB, downloaded once); a JDK 17 has to
be there. Jars are kept in `FLINK_ORACLE_HOME` (default: `~/.cache/flink-oracle`), the compiled class in
`~/.cache/gpu-join/flink`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Literal

from benchmarks.changes import COUNTS_FILE, read_counts
from benchmarks.common import summarise, write_results

FLINK_VERSION = "2.3.0"
SOURCE = Path(__file__).with_name("FlinkJoinBench.java")
MINI_BATCH_SIZE = 50_000
MINI_BATCH_LATENCY = "2 s"

# Flink reflects into these packages of the JDK.
_OPENED = (
    "java.lang",
    "java.lang.reflect",
    "java.net",
    "java.io",
    "java.nio",
    "java.text",
    "java.time",
    "java.util",
    "java.util.concurrent",
    "java.util.concurrent.atomic",
    "java.util.concurrent.locks",
)


class FlinkUnavailableError(RuntimeError):
    """Java or Flink's wheel cannot be had here; the message says which, and what to do."""


def run_flink(
    data_dir: str | os.PathLike[str],
    parallelism: int = 1,
    mini_batch: bool = False,
    *,
    source: Literal["sql", "lean"] = "sql",
    repeat: int = 1,
    heap: str = "4g",
    version: str = FLINK_VERSION,
    multi_join: bool = False,
    heap_at_row: int | None = None,
) -> dict[str, Any]:
    """Run the join `repeat` times in one JVM, so that all but the first run find compiled code.

    Args:
        data_dir: folder that `benchmarks.changes.write` filled.
        parallelism: of the join; each input is read by one task, which keeps the order of its changes.
        mini_batch: Flink's mini-batch join (`table.exec.mini-batch.*`, size and latency as in this module).
        source: ``"sql"``: Flink's own file connector and CSV format; ``"lean"``: this benchmark's parser.
        repeat: runs in the same JVM.
        heap: JVM heap, as `-Xmx` takes it.
        version: Flink release.
        multi_join: Flink's multi-way join instead of its chain of binary ones, for three inputs.
        heap_at_row: collect garbage and look at the heap when so many rows have been written, `heap_bytes` of the
            result. The run's time is then of no use.

    Returns:
        `rows_in`, `rows_out`, `kinds` (rows out per row kind) and `folded` of the last run; `seconds` and
        `cpu_seconds` (of the whole JVM) from the first row read to the last row written, per run; `whole_seconds`,
        with the planning and the start of the job;
        `rows_per_second`, changes in per second of the fastest run; `plan`, Flink's own plan; `settings`.

    Raises:
        FlinkUnavailableError: no JDK, or the wheel cannot be downloaded.
        FileNotFoundError: `data_dir` holds no generated changes.
        RuntimeError: Flink failed, or its folded result is not the expected one.
    """
    data = Path(data_dir).resolve()
    if not (data / COUNTS_FILE).is_file():
        raise FileNotFoundError(f"no generated changes in {data}: run `python -m benchmarks.changes` first")
    counts = read_counts(data)
    if source == "sql":
        _join_files(data, list(counts.changes))
    command = flink_command(SOURCE, heap, version)
    options = {
        "data": str(data),
        "source": source,
        "parallelism": str(parallelism),
        "mini-batch": str(mini_batch).lower(),
        "mini-batch-size": str(MINI_BATCH_SIZE),
        "mini-batch-latency": MINI_BATCH_LATENCY,
        "unique-key": str(counts.unique_key).lower(),
        "repeat": str(repeat),
        "inputs": str(len(counts.changes)),
        "multi-join": str(multi_join).lower(),
        "heap-at-row": str(heap_at_row or 0),
    }
    for name, value in options.items():
        command += [f"--{name}", value]
    runs = _output(command)
    expected = {name: getattr(counts, name) for name in ("rows", "pads", "amount", "price")}
    for run in runs:
        if run["folded"] != expected or run["rows_in"] != sum(counts.changes.values()):
            raise RuntimeError(f"Flink read {run['rows_in']} changes, folded {run['folded']}, not {expected}")
    seconds = [run["seconds"] for run in runs]
    return {
        **{name: runs[-1][name] for name in ("rows_in", "rows_out", "kinds", "folded", "plan")},
        "seconds": seconds,
        "whole_seconds": [run["whole_seconds"] for run in runs],
        "cpu_seconds": [run["cpu_seconds"] for run in runs],
        "heap_bytes": runs[-1]["heap_bytes"],
        "rows_per_second": runs[-1]["rows_in"] / min(seconds),
        "settings": {
            "flink": version,
            "source": source,
            "parallelism": parallelism,
            "multi_join": multi_join,
            "mini_batch": f"{MINI_BATCH_SIZE} rows, {MINI_BATCH_LATENCY}" if mini_batch else None,
            "heap": heap,
            "unique_key": counts.unique_key,
        },
    }


def run_sql(
    scripts: Sequence[str],
    parallelism: int,
    *,
    heap: str = "4g",
    version: str = FLINK_VERSION,
    jars: Sequence[Path] = (),
    heap_at_end: bool = False,
) -> list[dict[str, float]]:
    """Run scripts of SQL, one after the other in one JVM.

    Args:
        scripts: statements parted by empty lines, the last one an INSERT over bounded inputs.
        parallelism: of all operators.
        heap: JVM heap, as `-Xmx` takes it.
        version: Flink release.
        jars: of connectors that Flink's distribution lacks.
        heap_at_end: collect garbage all the time and look at the heap. The times are then of no use.

    Returns:
        Of each script `seconds`, what the last statement took, and `live_bytes`, the most live objects that were seen
        (0 without `heap_at_end`).

    Raises:
        FlinkUnavailableError: no JDK, or the wheel cannot be downloaded.
        RuntimeError: Flink failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, f"{number}.sql") for number in range(len(scripts))]
        for file, script in zip(files, scripts, strict=True):
            file.write_text(script)
        command = flink_command(SOURCE.with_name("FlinkSql.java"), heap, version, jars)
        return _output([*command, str(parallelism), str(heap_at_end).lower(), *map(str, files)])


def flink_command(source: Path, heap: str, version: str, jars: Sequence[Path] = ()) -> list[str]:
    """The command that starts the class of a Java source file with Flink."""
    java, lib = _tool("java"), flink_jars(version)
    return [
        java,
        *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED),
        # A heap of fixed size whose pages are there before the clock starts.
        f"-Xms{heap}",
        f"-Xmx{heap}",
        "-XX:+AlwaysPreTouch",
        "-XX:+UseParallelGC",  # the faster collector for this job; latency does not count here
        "-Dlog4j2.level=OFF",
        "-Duser.timezone=UTC",
        "-cp",
        os.pathsep.join([f"{lib}/*", str(_compiled(source, lib, version)), *map(str, jars)]),
        source.stem,
    ]


def _output(command: list[str]) -> list[dict[str, Any]]:
    """The JSON objects that a process prints.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"Flink failed with status {done.returncode}:\n{done.stderr[-4000:]}")
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def flink_jars(version: str = FLINK_VERSION) -> Path:
    """The folder of Flink's jars, downloaded when it is not there.

    Raises:
        FlinkUnavailableError: the wheel cannot be downloaded.
    """
    home = os.environ.get("FLINK_ORACLE_HOME")
    cache = Path(home) if home else Path.home() / ".cache" / "flink-oracle"
    lib = cache / f"flink-{version}" / "lib"
    if (lib / ".complete").exists():
        return lib
    lib.parent.mkdir(parents=True, exist_ok=True)
    requirement = f"apache-flink-libraries=={version}"
    with tempfile.TemporaryDirectory(dir=lib.parent) as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, requirement]
        done = subprocess.run(pip, capture_output=True, text=True, check=False)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = done.stderr.strip()[-1000:] or "it is not a wheel"
            raise FlinkUnavailableError(
                f"pip cannot download {requirement} (it needs PyPI and 700 MB of disk): {reason}"
            )
        unpacked = Path(folder) / "lib"
        unpacked.mkdir()
        with zipfile.ZipFile(wheels[0]) as wheel:
            for name in wheel.namelist():
                if "/lib/" in name and name.endswith(".jar"):
                    with wheel.open(name) as jar, (unpacked / Path(name).name).open("wb") as target:
                        shutil.copyfileobj(jar, target)
        (unpacked / ".complete").touch()
        shutil.rmtree(lib, ignore_errors=True)
        unpacked.rename(lib)
    return lib


def _join_files(data: Path, names: list[str]) -> None:
    """One file per input, `whole/orders.csv` and so on: Flink promises no order among several."""
    (data / "whole").mkdir(exist_ok=True)
    for name in names:
        with (data / "whole" / f"{name}.csv").open("wb") as target:
            for part in sorted((data / name).glob("part-*.csv")):
                with part.open("rb") as source:
                    shutil.copyfileobj(source, target)


def _compiled(source: Path, lib: Path, version: str) -> Path:
    """The folder of the compiled class; its name follows the source, so a changed source is compiled anew."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    classes = Path.home() / ".cache" / "gpu-join" / "flink" / f"{version}-{digest}"
    if classes.exists():
        return classes
    javac = _tool("javac")
    classes.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=classes.parent) as folder:
        target = Path(folder) / "classes"
        services = target / "META-INF" / "services"
        services.mkdir(parents=True)
        if source == SOURCE:  # Flink finds table connectors by this file
            (services / "org.apache.flink.table.factories.Factory").write_text("FlinkJoinBench$Connector\n")
        command = [javac, "-nowarn", "--release", "17", "-d", str(target), "-cp", f"{lib}/*", str(source)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise FlinkUnavailableError(f"{source.name} does not compile:\n{done.stderr[-4000:]}")
        try:
            target.rename(classes)
        except OSError:
            if not classes.exists():  # otherwise another process compiled the same source meanwhile
                raise
    return classes


def _tool(name: str) -> str:
    home = os.environ.get("JAVA_HOME")
    path = shutil.which(name, path=str(Path(home) / "bin")) if home else None
    path = path or shutil.which(name)
    if path is None:
        raise FlinkUnavailableError(f"no {name}: install a JDK 17 (not only a runtime) or set JAVA_HOME")
    return path


def main(arguments: list[str] | None = None) -> None:
    """Command line: every combination of source, parallelism and mini-batch, best of each."""
    parser = argparse.ArgumentParser(description="Measure Flink on the generated changes.")
    parser.add_argument("directory", help="written by benchmarks.changes")
    parser.add_argument("--source", choices=("sql", "lean"), nargs="+", default=["sql", "lean"])
    parser.add_argument("--parallelism", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--mini-batch", choices=("off", "on"), nargs="+", default=["off", "on"])
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--heap", default="4g")
    parser.add_argument("--output", help="also write the results there, as JSON")
    given = parser.parse_args(arguments)
    results: dict[str, Any] = {}
    try:
        for source, parallelism, mode in product(given.source, given.parallelism, given.mini_batch):
            name = f"{source}, parallelism {parallelism}, mini-batch {mode}"
            result = run_flink(
                given.directory, parallelism, mode == "on", source=source, repeat=given.repeat, heap=given.heap
            )
            results[name] = {**result, "summary": summarise(result["seconds"])}
            rate, seconds = result["rows_per_second"], ", ".join(f"{s:.2f}" for s in result["seconds"])
            print(f"{name}: {rate:,.0f} changes/s at best ({seconds} s)", flush=True)
    except FlinkUnavailableError as error:
        sys.exit(f"Flink is not available: {error}")
    if given.output:
        write_results(given.output, "flink", results, settings={"repeat": given.repeat})


if __name__ == "__main__":
    main()
