"""What NVIDIA's plugin for Spark, where it is on, changes in the plan of a join; read and tried with 26.08.1."""

from __future__ import annotations

from typing import Any, Final

from gpu_ops.bounded import Description
from gpu_ops.joins import Join
from gpu_ops.multi import MultiJoin
from gpu_ops.spark.settings import Settings

PLUGIN: Final = "com.nvidia.spark.SQLPlugin"


def plugin_on(session: Any) -> bool:
    """Whether the RAPIDS plugin rewrites this session's plans."""
    plugins = session.sparkContext.getConf().get("spark.plugins", "") or ""
    enabled = session.conf.get("spark.rapids.sql.enabled", "true")
    return PLUGIN in plugins and str(enabled).lower() != "false"


def shuffle_reorders(session: Any) -> bool:
    """Whether the shuffle may mix up the rows of one source partition.

    Spark's own keeps them in order; the plugin's hash partitioning promises none.
    """
    return plugin_on(session)


def metrics_reported(session: Any) -> bool:
    """Whether tasks tell the driver a join's metrics, because Spark's progress cannot have them.

    The plugin fails on every aggregate in ``DataFrame.observe`` (NVIDIA/cudf-spark#14152).
    """
    asked = Settings.of(session.sparkContext.getConf().getAll()).metrics
    return plugin_on(session) if asked is None else asked == "reported"


def order_matters(join: Description, number: int) -> bool:
    """Whether what a join says depends on the order of an input's rows within a micro-batch.

    The net change of rows that are only ever added does not. Where it does, rows are stamped, by an expression
    that the plugin leaves on the CPU, the scan's rows with it.

    Args:
        join: the description.
        number: of the input.
    """
    if not isinstance(join, (Join, MultiJoin)) or join.emit == "per_event":
        return True
    if isinstance(join, Join) and join.interval is not None:
        return True
    source = join.inputs[number]
    return not source.insert_only
