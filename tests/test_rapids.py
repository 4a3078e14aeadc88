"""What a session is given that shares its card with NVIDIA's plugin."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpu_ops.errors import DescriptionError
from gpu_ops.spark.rapids import RAPIDS_COORDINATES, RAPIDS_SPARK_VERSIONS, RAPIDS_VERSION, rapids_conf

DOCS = (Path(__file__).parents[1] / "docs" / "rapids.md").read_text()


@pytest.mark.parametrize("share", [0.05, 0.4, 0.8])
def test_plugin_and_state_servers_fit_on_one_card(share: float) -> None:
    conf = rapids_conf(state_share=share)
    pool = float(conf["spark.rapids.memory.gpu.allocFraction"])
    assert float(conf["spark.rapids.memory.gpu.minAllocFraction"]) <= pool
    assert pool == float(conf["spark.rapids.memory.gpu.maxAllocFraction"])
    assert 0.9 <= pool + share < 1


@pytest.mark.parametrize("share", [0, 0.04, 0.81, 1, -1])
def test_a_share_that_leaves_too_little(share: float) -> None:
    with pytest.raises(DescriptionError, match="between"):
        rapids_conf(state_share=share)


def test_the_jar_is_optional() -> None:
    assert "spark.jars" not in rapids_conf()
    assert rapids_conf(jar="a.jar")["spark.jars"] == "a.jar"


def test_the_documentation_has_the_same_settings() -> None:
    for key, value in rapids_conf(state_share=0.4).items():
        assert f"--conf {key}={value}" in DOCS
    assert RAPIDS_COORDINATES in DOCS
    assert f"rapids-4-spark_2.13-{RAPIDS_VERSION}-cuda13.jar" in DOCS


def test_the_default_spark_is_one_that_the_plugin_supports() -> None:
    wanted = re.search(r'pyspark[^"]*==([\d.]+)', (Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert wanted is not None
    assert wanted.group(1) in RAPIDS_SPARK_VERSIONS
