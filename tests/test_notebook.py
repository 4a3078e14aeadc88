"""The extension of IPython that shows why a query failed."""

from __future__ import annotations

import pytest

pytest.importorskip("pyspark")
shells = pytest.importorskip("IPython.core.interactiveshell")

CELL = """
from pyspark.errors import StreamingQueryException
def awaited():
    text = "[STREAM_FAILED] Query [id = 1-a, runId = 2-b] terminated with exception: "
    text += "Traceback (most recent call last):\\n"
    text += '  File "x.py", line 5, in f\\ngpu_ops.errors.BadInputError: the price is no number\\n\\n'
    raise StreamingQueryException(text + "\\tat org.apache.spark.X(X.scala:1)\\n" * 90)
awaited()
"""


def test_a_query_that_fails_in_a_cell_ends_in_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    """A cell ended in a hundred lines of Java's."""
    shell = shells.InteractiveShell()
    assert not shell.run_cell(CELL).success
    assert "org.apache.spark.X" in capsys.readouterr().out
    shell.run_line_magic("load_ext", "gpu_ops.notebook")
    done = shell.run_cell(CELL)
    assert type(done.error_in_exec).__name__ == "StreamingQueryException"
    assert capsys.readouterr().out.strip() == "the query failed: the price is no number"
    shell.run_cell("1 / 0")
    assert "ZeroDivisionError" in capsys.readouterr().out
    shell.run_line_magic("unload_ext", "gpu_ops.notebook")
    shell.run_cell(CELL)
    assert "org.apache.spark.X" in capsys.readouterr().out
