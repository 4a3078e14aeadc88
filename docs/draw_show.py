"""Draws what `gpu-join run --show` and `gpu-join top` have on the screen into docs/pictures.

`python docs/draw_show.py`. They are real ones: of the job that `gpu-join example` prints, and of one with two views of
the same tables, which `gpu-join top` watches while it runs.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import socket
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console

from gpu_ops.jobs import runner
from gpu_ops.jobs.job import amended, load
from gpu_ops.jobs.screen import Screen
from gpu_ops.spark.metrics.live import JoinTable, Scrape, UnservedError, scrape

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
WIDTH, HEIGHT = 92, 25
SECONDS = 24
"""How long the tables have new rows."""

VIEWS = """
CREATE VIEW priced AS
SELECT o.id, o.item, o.quantity * p.price AS total FROM orders o LEFT JOIN prices p ON o.item = p.item;

CREATE MATERIALIZED VIEW by_item WITH ('connector' = 'console')
AS SELECT item, count(*) AS orders, sum(total) AS total FROM priced GROUP BY item;

CREATE MATERIALIZED VIEW largest WITH ('connector' = 'console')
AS SELECT id, item, total FROM priced WHERE total > 0 ORDER BY total DESC LIMIT 5;
"""


def terminal(height: int = HEIGHT) -> Console:
    """One that nobody sees."""
    return Console(record=True, force_terminal=True, width=WIDTH, height=height, file=io.StringIO())


def example() -> str:
    """The job that `gpu-join example` prints, whose tables end."""
    text = (ROOT / "gpu_ops" / "jobs" / "example.sql").read_text()
    for rate in (10, 1):
        each = f"'rows-per-second' = '{rate}',"
        text = text.replace(each, f"{each} 'number-of-rows' = '{rate * SECONDS}',")
    return text


def last_screen(text: str, height: int, *settings: str) -> Screen:
    """What is on the screen when a job has ended."""
    shown: list[Screen] = []
    original = runner.screen

    @contextlib.contextmanager
    def kept(console: Console, *titles: str) -> Iterator[Screen]:
        with original(console, *titles) as screen:
            shown.append(screen)
            yield screen

    runner.screen = kept
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        Path("job.sql").write_text(text)
        runner.run(amended(load("job.sql"), {}, None, settings), terminal(height), show=True)
    runner.screen = original
    return shown[0]


def draw(what: Any, name: str, title: str, height: int = HEIGHT) -> None:
    """Draws it into a file."""
    drawn = terminal(height)
    drawn.print(what)
    svg = drawn.export_svg(title=title)
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # the site loads nothing from elsewhere
    (PICTURES / name).write_text(svg.replace("Fira Code", "DejaVu Sans Mono"))


def watch(port: int, over: threading.Event, seen: list[Scrape]) -> None:
    """Reads the metrics every two seconds, until the job is over."""
    while not over.wait(2):
        with contextlib.suppress(UnservedError):
            seen.append(scrape(f"http://127.0.0.1:{port}/metrics"))


def main() -> None:
    """Runs both jobs until their tables have ended, and draws the last pictures."""
    draw(last_screen(example(), HEIGHT).drawn(), "run_show.svg", "gpu-join run job.sql --show")

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    over, seen = threading.Event(), list[Scrape]()
    watching = threading.Thread(target=watch, args=(port, over, seen))
    watching.start()
    two = example().partition("CREATE TABLE totals")[0] + VIEWS
    screen = last_screen(two, 33, f"spark.gpu_ops.prometheus.port={port}")
    over.set()
    watching.join()
    draw(screen.drawn(), "run_views.svg", "gpu-join run views.sql --show", 33)
    running = [one for one in seen if one.joins and all("micro_batch" in values for values in one.joins.values())]
    draw(JoinTable(running[-2], running[-5]), "top.svg", "gpu-join top 9095", 14)


if __name__ == "__main__":
    os.environ.setdefault("COLUMNS", str(WIDTH))
    main()
