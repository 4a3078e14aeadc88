"""State folders as Spark sees them: what Hadoop calls them, and whether executors on other machines can have them."""

from __future__ import annotations

import os
import warnings
from typing import Any, Final

from gpu_ops.spark.cluster.executors import one_machine
from gpu_ops.state.address import StateAddress

_HADOOP: Final = {"s3": "s3a", "gcs": "gs"}


def as_hadoop_has_it(folder: StateAddress) -> str:
    """A folder's name for Spark to read and write; a local one is made, for its owner alone."""
    if folder.path is not None:
        os.makedirs(folder.path, mode=0o700, exist_ok=True)
        return f"file://{os.path.abspath(folder.path)}"
    scheme, _, rest = folder.secret_uri.partition("://")
    host, _, path = rest.partition("/")
    return f"{_HADOOP.get(scheme, scheme)}://{host.rpartition('@')[2]}/{path.partition('?')[0]}"


class LocalStateWarning(UserWarning):
    """A state folder that only one machine may have, on a cluster of several."""


def warn_of_local_folder(context: Any, state: StateAddress, *, stacklevel: int) -> None:
    """Warns of a plain local path on a cluster; ``file:///...`` says that it is a mount all machines share.

    Args:
        context: the SparkContext.
        state: the state folder.
        stacklevel: of the warning, seen from here.
    """
    if one_machine(context) or not state.plain:
        return
    warnings.warn(
        f"state='{state}' is a local path, and executors are on other machines (master {context.master}): "
        "the driver and all executors must see the same folder there. Give a URI (hdfs://, s3://, gs://), or "
        f"'file://{state}' if it is on a mount that all of them share",
        LocalStateWarning,
        stacklevel=stacklevel + 1,
    )
