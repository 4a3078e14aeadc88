"""``gpu-join run``: what the command line adds to a job, and the summary in the end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from gpu_ops.errors import DescriptionError
from gpu_ops.jobs import runner
from gpu_ops.jobs.connectors import JOB
from gpu_ops.jobs.job import Job, load
from gpu_ops.jobs.settings import value_of


def run_file(
    path: Path,
    console: Console,
    *,
    given: Mapping[str, str],
    packages: str | None = None,
    conf: Sequence[str] = (),
    once: bool = False,
    explain: bool = False,
) -> None:
    """Runs the job in a file.

    Args:
        path: the file.
        console: where to report.
        given: settings that replace those of the file; folders as seen from the working folder.
        packages: Maven packages for Spark, comma-separated, besides those of the file.
        conf: Spark settings, ``name=value``.
        once: take what there is and end.
        explain: print what would run, and run nothing.

    Raises:
        DescriptionError: something cannot be.
        JobFailedError: the job failed on the way.
    """
    job = amended(load(path), given, packages, conf)
    if explain:
        console.print(runner.explain(job, console), markup=False, soft_wrap=True)
        return
    began = time.perf_counter()
    outcome = runner.run(job, console, once=once)
    seconds = time.perf_counter() - began
    ended = "stopped after" if outcome.interrupted else "done:"
    changes = "" if outcome.rows_out is None else f", {outcome.rows_out:,} changes out"
    batches = f"{outcome.batches} micro-batch{'' if outcome.batches == 1 else 'es'}"
    console.print(
        f"{ended} {batches}, {outcome.rows_in:,} rows in{changes}, {seconds:.1f} s in all",
        markup=False,
    )
    if job.state is not None:
        console.print(f"state in {job.state}; the same command goes on from here", markup=False, soft_wrap=True)


def amended(job: Job, given: Mapping[str, str], packages: str | None, conf: Sequence[str]) -> Job:
    """A job with the settings of the command line.

    Raises:
        DescriptionError: one of them cannot be.
    """
    spark = dict(job.spark)
    for setting in conf:
        name, equals, value = setting.partition("=")
        if not equals or not name.startswith("spark."):
            raise DescriptionError(f"--conf {setting}: a Spark setting is written spark.name=value")
        spark[name] = value
    if packages is not None:
        before = spark.get("spark.jars.packages")
        spark["spark.jars.packages"] = packages if before is None else f"{before},{packages}"
    settings = {name: value_of(name, JOB[name], text, Path.cwd()) for name, text in given.items()}
    return dataclasses.replace(job, spark=spark, **settings)
