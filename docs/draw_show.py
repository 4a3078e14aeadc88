"""Draws what `gpu-join run job.sql --show` has on the screen into docs/pictures/run_show.svg.

`python docs/draw_show.py`. It is a real one, of the job that `gpu-join example` prints.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from gpu_ops.jobs import runner
from gpu_ops.jobs.job import load
from gpu_ops.jobs.screen import Screen

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "pictures" / "run_show.svg"
WIDTH, HEIGHT = 92, 25


def terminal() -> Console:
    """One that nobody sees."""
    return Console(record=True, force_terminal=True, width=WIDTH, height=HEIGHT, file=io.StringIO())


def main() -> None:
    """Runs the job until both its tables have ended, and draws the last picture."""
    text = (ROOT / "gpu_ops" / "jobs" / "example.sql").read_text()
    text = text.replace("'rows-per-second' = '10',", "'rows-per-second' = '10', 'number-of-rows' = '240',")
    text = text.replace("'rows-per-second' = '1',", "'rows-per-second' = '1', 'number-of-rows' = '24',")
    shown: list[Screen] = []
    original = runner.screen

    @contextlib.contextmanager
    def kept(console: Console, *titles: str) -> Iterator[Screen]:
        with original(console, *titles) as screen:
            shown.append(screen)
            yield screen

    runner.screen = kept
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("job.sql").write_text(text)
        runner.run(load("job.sql"), terminal(), show=True)
    drawn = terminal()
    drawn.print(shown[0].drawn())
    svg = drawn.export_svg(title="gpu-join run job.sql --show")
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)  # the site loads nothing from elsewhere
    PICTURE.write_text(svg.replace("Fira Code", "DejaVu Sans Mono"))


if __name__ == "__main__":
    main()
