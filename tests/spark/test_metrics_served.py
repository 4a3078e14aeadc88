"""An application that serves its joins' metrics, looked at from outside while its query runs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

APPLICATION = """
import pathlib, sys, urllib.request
import gpu_ops
from gpu_ops.cli import app
from gpu_ops.spark import session

port, folder = sys.argv[1], pathlib.Path(sys.argv[2])
spark = session(master="local[1]", config={"spark.gpu_ops.prometheus.port": port, "spark.log.level": "ERROR"})
print("ui", spark.sparkContext.uiWebUrl is not None)
(folder / "a").mkdir()
(folder / "a" / "1.json").write_text('{"k": 1}\\n{"k": 2}')
a, b = (spark.readStream.schema("k INT").json(str(folder / "a")) for _ in range(2))
rows = gpu_ops.join(a, b, "k", "left", state=folder / "state", name="pairs")
query = rows.writeStream.format("memory").queryName("watched").start()
query.processAllAvailable()
spark.sparkContext._jsc.sc().listenerBus().waitUntilEmpty(10_000)
url = f"http://127.0.0.1:{port}/metrics"
print(urllib.request.urlopen(url).read().decode())
app(["top", port, "--once", "--every", "0.2"], standalone_mode=False)
query.stop()
spark.stop()
"""


@pytest.mark.slow
def test_metrics_are_served_while_a_query_runs(spark, tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-c", APPLICATION, str(port), str(tmp_path)]
    wide = {**os.environ, "COLUMNS": "160"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, env=wide)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "ui True"
    served = dict(line.rsplit(" ", 1) for line in lines if line.startswith("gpu_join_"))
    labels = 'join="pairs",query="watched"'
    assert served[f'gpu_join_rows_in_total{{input="left",{labels}}}'] == "2.0"
    assert served['gpu_join_rows_out_total{join="pairs",kind="insert",query="watched"}'] == "2.0"
    assert served[f'gpu_join_state_rows{{input="right",{labels}}}'] == "2.0"
    assert served[f"gpu_join_micro_batch_seconds_count{{{labels}}}"] == "1.0"
    assert lines[-1].split()[:3] == ["watched", "pairs", "0"]
    assert lines[-1].split()[5] == "4"
