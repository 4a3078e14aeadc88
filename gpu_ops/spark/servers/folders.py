"""Whether executors on other machines can have the same state folder as the driver."""

from __future__ import annotations

import warnings
from typing import Any

from gpu_ops.spark.cluster.executors import one_machine
from gpu_ops.state.address import StateAddress


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
