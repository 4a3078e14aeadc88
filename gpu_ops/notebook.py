"""An extension of IPython, ``%load_ext gpu_ops.notebook``: a query that fails in a cell ends in one message.

Without it the cell shows the text of Spark's exception, with a hundred lines of Java's stacks in it.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from pyspark.errors import StreamingQueryException

from gpu_ops.spark.failures import why


def load_ipython_extension(shell: Any) -> None:
    """Shows why a query failed, as `gpu_ops.why` says it, for exceptions of queries; called by ``%load_ext``."""
    shell.set_custom_exc((StreamingQueryException,), _show)


def unload_ipython_extension(shell: Any) -> None:
    """Shows exceptions of queries as IPython does; called by ``%unload_ext``."""
    shell.set_custom_exc((), None)


def _show(
    shell: Any, kind: type[BaseException], error: Any, trace: TracebackType, tb_offset: int | None = None
) -> None:
    error._render_traceback_ = lambda: [f"the query failed: {why(error)}"]
    shell.showtraceback((kind, error, trace), tb_offset=tb_offset)
