"""The settings that help: known to this Spark, set by the pack's own session, and settable in a running one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gpu_ops.spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_own_session_has_the_recommended_settings(spark: SparkSession) -> None:
    recommended = gpu_ops.spark.recommended_conf()
    assert {key: spark.conf.get(key) for key in recommended} == recommended


def test_recommended_settings_are_known_and_may_be_set_while_spark_runs(spark: SparkSession) -> None:
    for key, value in gpu_ops.spark.recommended_conf().items():
        assert spark.conf.isModifiable(key)  # false for a name that this Spark does not know
        spark.conf.set(key, value)


def test_what_is_handed_out_is_a_copy() -> None:
    gpu_ops.spark.recommended_conf().clear()
    assert gpu_ops.spark.recommended_conf()
