"""A driver whose state is on S3, with credentials in its URI; prints what a user sees when all goes well, and when not.

``test_secrets.py`` runs ``python secrets_app.py FOLDER`` and searches all that this prints and leaves behind.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pyarrow.fs as pafs
from moto.server import ThreadedMotoServer
from rich.console import Console

import gpu_ops
from gpu_ops import stream
from gpu_ops.spark import join_progress, session
from gpu_ops.spark.driver.directory import Directory
from gpu_ops.spark.server import inspection
from gpu_ops.spark.server.rescale import rescale
from gpu_ops.state.files import Files
from spark.support import Sink, Source, drain

KEY, SECRET = "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY="
PARTS = (KEY, "wJalrXUtnFEMI", "K7MDENG", "bPxRfiCYEXAMPLEKEY")


def refused(what: str, call: Callable[[], object]) -> None:
    """Prints an error as a user would see it."""
    try:
        call()
    except Exception as error:
        print(what, str(error), repr(error), "".join(traceback.format_exception(error)), sep="\n")
        print(f"refused: {what}")
    else:
        raise AssertionError(f"{what} was not refused")


def main(folder: Path) -> None:
    logging.basicConfig(level=logging.DEBUG)
    logging.getLogger("py4j").setLevel(logging.WARNING)  # it logs each byte of a pickled plan, in base 64
    os.environ["AWS_EC2_METADATA_DISABLED"] = "true"
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    endpoint = "{}:{}".format(*server.get_host_and_port())
    place = f"{quote(KEY, safe='')}:{quote(SECRET, safe='')}@states"
    options = f"endpoint_override={endpoint}&scheme=http&region=us-east-1"
    states = pafs.S3FileSystem(
        access_key=KEY, secret_key=SECRET, endpoint_override=endpoint, scheme="http", region="us-east-1",
        allow_bucket_creation=True,
    )  # fmt: skip
    states.create_dir("states")
    (folder / "events").mkdir()
    spark = session(
        "secrets",
        master="local[2]",
        config={
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(folder / "warehouse"),
            "spark.log.level": "INFO",
            "spark.ui.showConsoleProgress": "false",
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
            "spark.eventLog.enabled": "true",
            "spark.eventLog.compress": "false",
            "spark.eventLog.dir": (folder / "events").as_uri(),
        },
    )
    left = Source(spark, folder / "left", "op string, k long, a string, t timestamp")
    right = Source(spark, folder / "right", "op string, k long, b double, u timestamp")
    at = "2026-01-01 00:00:00"
    left.add({"op": "+I", "k": 1, "a": "x", "t": at}, {"op": "+I", "k": 2, "a": "y", "t": at})
    right.add({"op": "+I", "k": 1, "b": 0.5, "u": at})

    def joined(path: str) -> Any:
        sides = stream(left.df, name="l", row_kind="op"), stream(right.df.drop("op"), name="r")
        return gpu_ops.join(*sides, on="k", how="left", state=f"s3://{place}/{path}?{options}")

    changes, sink = joined("a"), Sink()
    print(gpu_ops.explain(changes))
    changes.explain(True)
    query = drain(changes, sink, folder / "checkpoint")
    assert [row[:2] for row in sink.table] == [(1, "x"), (2, "y")], sink.table
    print(query.lastProgress, join_progress(query.lastProgress))
    uri = f"s3://{place}/a?{options}"
    assert Files.at(uri).sizes("").keys() == {"manifest.json"}, "the state is on S3"
    inspection.describe(uri, Console())

    refused("another query", lambda: drain(joined("a"), Sink(), folder / "checkpoint2"))
    manifest = Files.at(uri).read("manifest.json").to_pybytes()
    Files.at(uri).write("manifest.json", lambda file: file.write(b"{"))
    refused("a damaged manifest", lambda: joined("a"))
    refused("a damaged manifest, inspected", lambda: inspection.describe(uri, Console()))
    Files.at(uri).write("manifest.json", lambda file: file.write(manifest))
    refused("another bucket", lambda: joined("../b"))
    refused("no bucket", lambda: inspection.describe(uri.replace("@states", "@nowhere"), Console()))
    refused("no such option", lambda: inspection.describe(f"{uri}&secret_key={quote(SECRET)}", Console()))
    refused("another scheme", lambda: inspection.describe(uri.replace("s3:", "s3a:"), Console()))
    timed = (stream(left.df.drop("op"), name="l", event_time="t", delay="1 second"),
             stream(right.df.drop("op"), name="r", event_time="u", delay="1 second"))  # fmt: skip
    interval = gpu_ops.interval_join(*timed, on="k", lower=0, upper="1 minute", state=uri)
    refused("an interval join's", lambda: drain(interval, Sink(), folder / "checkpoint3"))
    print(rescale(uri, 3))
    print(gpu_ops.finish(spark, state=uri).collect())
    servers: Any = Directory.of(spark).servers
    for log in sorted(servers._launcher.logs.iterdir()):
        print(log.name, log.read_text(), sep="\n")
    spark.stop()
    server.stop()
    print(json.dumps({"done": True}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
