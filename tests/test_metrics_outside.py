"""Metrics for Prometheus, the dashboard over them, the view in a terminal, and spans: all without Spark."""

from __future__ import annotations

import io
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
import types
import urllib.error
import urllib.parse
import urllib.request
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from gpu_ops import NotBuiltError
from gpu_ops.errors import DescriptionError
from gpu_ops.spark.metrics import live, progress
from gpu_ops.spark.metrics.metrics import metric_names
from gpu_ops.spark.metrics.progress import JoinProgress
from gpu_ops.spark.settings import Settings

pytestmark = pytest.mark.thorough

client = pytest.importorskip("prometheus_client")

ROOT = Path(__file__).resolve().parents[1]
DASHBOARD = ROOT / "docker" / "grafana" / "dashboard.json"
QUERY = {"join": "orders", "query": "q"}


def entry(batch_id: int = 0, by_time: bool = True, **metrics: int | float) -> JoinProgress:
    names = metric_names(("left", "right"), by_time=by_time)
    found = {**dict.fromkeys(names, 0), "partitions": 2, **metrics}
    return JoinProgress("orders", "id-1", "q", batch_id, "2026-11-23T08:00:00.250Z", found, trigger_ms=500)


def test_counters_add_up_and_gauges_do_not():
    registry = client.CollectorRegistry()
    metrics = progress.Prometheus.of(registry)
    assert progress.Prometheus.of(registry) is metrics
    for batch_id in (0, 1):
        step = {
            "probe_ms": 20.0,
            "commit_ms": 3.0,
            "retries": 1,
            "left_late": 2,
            "watermark_lag_ms": 1500,
            "lookups_index": 6,
        }
        metrics.add(entry(batch_id, left_rows_in=10, right_rows_in=1, left_state_rows=7, rows_out_insert=4, **step))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"gpu_join_{name}", {**QUERY, **labels})

    assert (value("rows_in_total", input="left"), value("rows_in_total", input="right")) == (20, 2)
    assert (value("rows_out_total", kind="insert"), value("rows_out_total", kind="delete")) == (8, 0)
    assert (value("late_rows_total", input="left"), value("retries_total")) == (4, 2)
    assert (value("state_rows", input="left"), value("micro_batch")) == (7, 1)
    assert (value("lookups_total", way="index"), value("lookups_total", way="kept_table")) == (12, 0)
    assert value("watermark_lag_seconds") == 1.5
    assert value("step_seconds_count", step="probe") == 2
    assert value("step_seconds_sum", step="probe") == pytest.approx(0.04)
    assert value("step_seconds_sum", step="commit") == pytest.approx(0.006)
    assert (value("micro_batch_seconds_count"), value("micro_batch_seconds_sum")) == (2, 1.0)
    metrics.ended("id-1")
    assert value("state_rows", input="left") is None
    assert value("rows_in_total", input="left") == 20


def test_every_metric_is_served_and_every_one_of_the_dashboard_is_there():
    registry = client.CollectorRegistry()
    progress.Prometheus.of(registry).add(entry())
    served = set(re.findall(r"^(gpu_join_\w+)\{", client.generate_latest(registry).decode(), re.MULTILINE))
    names = {re.sub(r"_(total|bucket|sum|count|created)$", "", name) for name in served}
    assert names == {f"gpu_join_{metric.name}" for metric in progress.METRICS}
    board = json.loads(DASHBOARD.read_text())
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    asked = {name for target in targets for name in re.findall(r"gpu_join_\w+", target["expr"])}
    asked |= {x for v in board["templating"]["list"][1:] for x in re.findall(r"gpu_join_\w+", v["query"]["query"])}
    assert asked <= served, asked - served
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    assert all(panel["targets"] and panel["datasource"]["uid"] == "${source}" for panel in board["panels"])
    assert all(target["expr"].count("(") == target["expr"].count(")") for target in targets)


def test_prometheus_answers_every_panel(tmp_path):
    """The shipped configuration, with this port for the container's, and the dashboard's own queries."""
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("there is no prometheus here (Debian: `apt-get install prometheus`)")
    registry = client.CollectorRegistry()
    metrics = progress.Prometheus.of(registry)
    served, thread = client.start_http_server(0, "127.0.0.1", registry)
    config = (ROOT / "docker" / "prometheus.yaml").read_text()
    assert "notebooks:9095" in config
    config = config.replace("notebooks:9095", f"127.0.0.1:{served.server_port}").replace(": 5s", ": 500ms")
    (tmp_path / "prometheus.yaml").write_text(config)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [program, f"--config.file={tmp_path}/prometheus.yaml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("w") as log:
        running = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    asked = {
        target["expr"].replace("$__rate_interval", "10s").replace("$__range", "10s").replace("$query", ".*")
        .replace("$join", ".*")
        for panel in json.loads(DASHBOARD.read_text())["panels"] for target in panel["targets"]
    }  # fmt: skip
    assert not [expression for expression in asked if "$" in expression]
    try:
        for batch_id in range(200):
            metrics.add(entry(batch_id, left_rows_in=10, watermark_lag_ms=1500, probe_ms=20.0))
            time.sleep(0.2)
            asked -= {expression for expression in asked if answered(address, expression)}
            if not asked:
                break
        assert not asked, (tmp_path / "log").read_text()[-2000:]
    finally:
        running.kill()
        running.wait()
        served.shutdown()
        served.server_close()
        thread.join()


def answered(address: str, expression: str) -> bool:
    """Whether Prometheus has a number for an expression; it takes a while to start and to scrape twice."""
    url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            found = json.loads(reply.read())["data"]["result"]
    except urllib.error.HTTPError as error:
        if error.code == 400:  # it cannot be parsed
            raise AssertionError(error.read().decode()) from error
        return False
    except OSError:
        return False
    # a quantile of a histogram without observations in the window is no number
    return any(series["value"][1] != "NaN" for series in found)


def test_the_view_in_a_terminal():
    registry = client.CollectorRegistry()
    metrics, handler = progress.Prometheus.of(registry), client.MetricsHandler.factory(registry)
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/metrics"
    try:
        metrics.add(entry(left_rows_in=100, left_state_rows=90, right_state_rows=10, left_state_bytes=2_000_000))
        before = live.scrape(url)
        metrics.add(
            entry(
                1,
                left_rows_in=50,
                right_rows_in=50,
                rows_out_insert=30,
                left_state_rows=1234,
                retries=3,
                snapshot_age_ms=12_000,
                lookups_index=10,
                lookups_kept_table=5,
                lookups_hash_join=5,
            )
        )
        now = live.scrape(url)._replace(at=before.at + 2)
        console = Console(width=180, record=True, file=io.StringIO())
        console.print(live.JoinTable(now, before))
        head, row = console.export_text().splitlines()[:2]
        assert head.split() == ["query", "join", *" ".join(live._NUMBERS).split()]
        assert row.split() == [
            "q",
            "orders",
            "1",
            "50",
            "15",
            "1,234",
            "0",
            "B",
            "0",
            "B",
            "0",
            "12",
            "0.50",
            "50%",
            "0",
            "0",
            "3",
        ]
        metrics.ended("id-1")
        console.print(live.JoinTable(live.scrape(url)))
        assert "ended" in console.export_text()
    finally:
        server.shutdown()
        server.server_close()
    with pytest.raises(live.UnservedError, match=r"nothing serves metrics at .*--metrics-port"):
        live.scrape(url)


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.setitem(sys.modules, "prometheus_client.parser", None)
    for ask in (progress.Prometheus.of, lambda: live.scrape("http://127.0.0.1:1"), lambda: progress.serve(("", 1))):
        with pytest.raises(NotBuiltError, match=r"pip install 'gpu-join\[metrics\]'"):
            ask()


def test_where_metrics_are_served():
    name = "spark.gpu_ops.prometheus.port"
    assert Settings.of([(name, "9095")]).prometheus == (None, 9095)
    assert Settings.of([(name, "0.0.0.0:9095")]).prometheus == ("0.0.0.0", 9095)
    for wrong in ("", "x", "0", "70000", "host:"):
        with pytest.raises(DescriptionError, match=r"prometheus\.port=.*a port, or host:port"):
            Settings.of([(name, wrong)])
    server = progress.serve(("127.0.0.1", port := _free_port()))
    try:
        with pytest.raises(DescriptionError, match=rf"127\.0\.0\.1:{port}: .*in use"):
            progress.serve(("127.0.0.1", port))
    finally:
        server.shutdown()
        server.server_close()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_a_micro_batch_is_a_span(monkeypatch):
    """On the API alone; what is asked of it is what its documentation has."""
    spans: list[dict[str, Any]] = []

    class Span:
        def __init__(self, made: dict[str, Any]) -> None:
            self.made = made

        def end(self, end_time: int) -> None:
            self.made["end"] = end_time

    class Tracer:
        def start_span(self, name: str, *, attributes: dict[str, Any], start_time: int) -> Span:
            spans.append({"name": name, "attributes": attributes, "start": start_time})
            return Span(spans[-1])

    api = types.ModuleType("opentelemetry.trace")
    api.get_tracer = lambda name: Tracer()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", api)
    monkeypatch.setitem(sys.modules, "opentelemetry", types.ModuleType("opentelemetry"))
    progress.trace(entry(3, left_rows_in=5, probe_ms=1.5))
    (span,) = spans
    assert span["name"] == "gpu_join.micro_batch"
    assert span["end"] - span["start"] == 500_000_000
    assert span["start"] == 1_795_420_800_250_000_000
    assert span["attributes"]["gpu_join.micro_batch"] == 3
    assert span["attributes"]["gpu_join.left_rows_in"] == 5
    assert span["attributes"]["gpu_join.query"] == "q"


@pytest.mark.parametrize("width", [40, 80, 130, 200])
def test_the_view_in_a_terminal_is_readable_at_any_width(width: int) -> None:
    """At 80 columns it was `ro... ro... sta...`, at 130 joins were `durable` and `durabl...`."""
    names = [("enrichment", f"durable_orders_with_prices_{n}") for n in (1, 2)]
    values = {"micro_batch": 12.0, "rows_in_total": 5e6, "state_rows": 123_456.0, "state_bytes": 7e9}
    now = live.Scrape(2.0, dict.fromkeys(names, values))
    before = live.Scrape(1.0, {name: {**values, "rows_in_total": 0.0} for name in names})
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(live.JoinTable(now, before))
    text = console.export_text()
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert "…" not in text
    for word in (
        *live._NUMBERS,
        "durable_orders_with_prices_1",
        "durable_orders_with_prices_2",
        "5,000,000",
        "123,456",
    ):
        assert word in text
    assert (len(lines) == 3) == (width == 200)
