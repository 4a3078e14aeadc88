"""A query whose state is on S3, with credentials in its URI: they are in nothing that is printed, logged or stored."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("moto")

pytestmark = [pytest.mark.spark, pytest.mark.thorough]


@pytest.mark.slow
def test_credentials_of_a_state_folder_are_shown_nowhere(spark: object, tmp_path: Path) -> None:
    del spark  # skips where there is none
    from spark.secrets_app import PARTS

    tests = Path(__file__).parent.parent
    folders = os.pathsep.join([str(tests.parent), str(tests), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("secrets_app.py")), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": folders}, capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    assert done.stdout.count("\nrefused: ") == 8
    assert "s3://states/a" in done.stdout
    assert "state server" in done.stdout  # a log
    left = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert any("events" in path.parts and b"SparkListenerTaskEnd" in content for path, content in left.items())
    assert any(path.match("checkpoint/offsets/0") for path in left)
    for part in PARTS:
        assert part not in done.stdout
        assert part not in done.stderr
        assert [path for path, content in left.items() if part.encode() in content] == []
