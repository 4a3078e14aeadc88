"""What NVIDIA's plugin for Spark, where it is on, changes in the plan of a join; read and tried with 26.08.1."""

from __future__ import annotations

from typing import Any, Final

from gpu_ops.spark.settings import Settings

PLUGIN: Final = "com.nvidia.spark.SQLPlugin"


def plugin_on(session: Any) -> bool:
    """Whether the RAPIDS plugin rewrites this session's plans."""
    plugins = session.conf.get("spark.plugins", "") or ""
    enabled = session.conf.get("spark.rapids.sql.enabled", "true")
    return PLUGIN in plugins and str(enabled).lower() != "false"


def shuffle_reorders(session: Any) -> bool:
    """Whether the shuffle may mix up the rows of one source partition.

    Spark's own keeps them in order; the plugin's hash partitioning promises none.
    """
    return plugin_on(session)


def metrics_reported(session: Any) -> bool:
    """Whether tasks report a join's metrics to the driver, because Spark's progress cannot have them.

    The plugin fails on every aggregate in ``DataFrame.observe`` (NVIDIA/cudf-spark#14152).
    """
    asked = Settings.of_application(session.sparkContext).metrics
    return plugin_on(session) if asked is None else asked == "reported"
