"""What a session is given that shares its card with NVIDIA's plugin."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpu_ops.errors import DescriptionError
from gpu_ops.memory import memory_size
from gpu_ops.spark.settings import RAPIDS_COORDINATES, RAPIDS_SPARK_VERSIONS, RAPIDS_VERSION, Settings, rapids_conf

pytestmark = pytest.mark.thorough

DOCS = (Path(__file__).parents[1] / "docs" / "rapids.md").read_text()


@pytest.mark.parametrize("share", [0.05, 0.4, 0.8])
def test_plugin_and_state_servers_fit_on_one_card(share: float) -> None:
    conf = rapids_conf(state_share=share)
    pool = float(conf["spark.rapids.memory.gpu.allocFraction"])
    assert float(conf["spark.rapids.memory.gpu.minAllocFraction"]) <= pool
    assert pool == float(conf["spark.rapids.memory.gpu.maxAllocFraction"])
    assert pool + share == pytest.approx(1)


@pytest.mark.parametrize("card", [14.6, 79.6])
@pytest.mark.parametrize("share", [0.05, 0.4, 0.8])
def test_what_stays_free_is_no_share_of_the_card(card: float, share: float) -> None:
    """A T4 kept 0.7 GiB, too little for two contexts and their modules, an H100 4 GiB."""
    conf, free = rapids_conf(state_share=share), card - 0.3  # the plugin's own context is there by then
    part, most, least = (
        float(conf[f"spark.rapids.memory.gpu.{name}"])
        for name in ("allocFraction", "maxAllocFraction", "minAllocFraction")
    )
    reserve = memory_size(conf["spark.rapids.memory.gpu.reserve"]) / 2**30
    assert reserve == 1.5
    pool = part * (free - reserve)  # as the plugin's GpuDeviceManager reckons
    assert least * card <= pool <= most * card
    pool = min(pool, most * card - reserve)
    assert card - pool - share * card >= 1.5 - 1e-9
    assert pool > 0.5


@pytest.mark.parametrize("share", [0, 0.04, 0.81, 1, -1])
def test_a_share_that_leaves_too_little(share: float) -> None:
    with pytest.raises(DescriptionError, match="between"):
        rapids_conf(state_share=share)


def test_the_jar_is_optional() -> None:
    assert "spark.jars" not in rapids_conf()
    assert rapids_conf(jar="a.jar")["spark.jars"] == "a.jar"


@pytest.mark.parametrize("cores", [2, 8, 16, 64])
def test_on_a_cluster_tasks_and_the_servers_task_fit_on_one_card(cores: int) -> None:
    conf = rapids_conf(executor_cores=cores)
    assert conf["spark.executor.resource.gpu.amount"] == "1"
    part = float(conf["spark.task.resource.gpu.amount"])
    assert part > 0
    assert cores * part + Settings.server_gpu <= 1
    assert 1 // part >= cores  # by Spark's reckoning of slots, cores are what limits them


def test_settings_of_executors() -> None:
    assert not [key for key in rapids_conf() if key.startswith("spark.executor.")]
    conf = rapids_conf(executor_cores=8, discovery_script="./gpus.sh")
    assert conf["spark.executor.resource.gpu.discoveryScript"] == "./gpus.sh"
    with pytest.raises(DescriptionError, match="executor_cores=, too"):
        rapids_conf(discovery_script="./gpus.sh")
    with pytest.raises(DescriptionError, match="2 or more"):
        rapids_conf(executor_cores=1)


def test_the_servers_limit_is_their_share() -> None:
    assert Settings.of(rapids_conf(state_share=0.3).items()).memory_gpu == "0.30"


def test_the_documentation_has_the_same_settings() -> None:
    lines = re.findall(r"spark-submit .*?job\.py", DOCS, re.DOTALL)
    local, cluster = ({*re.findall(r"--conf (\S+)", line)} for line in lines)
    assert {f"{key}={value}" for key, value in rapids_conf(state_share=0.4).items()} <= local
    given = rapids_conf(state_share=0.4, executor_cores=16, discovery_script="./getGpusResources.sh")
    assert {f"{key}={value}" for key, value in given.items()} <= cluster
    assert RAPIDS_COORDINATES in DOCS
    assert f"rapids-4-spark_2.13-{RAPIDS_VERSION}-cuda13.jar" in DOCS


def test_the_image_has_the_plugin_for_the_spark_it_has() -> None:
    folder = Path(__file__).parents[1] / "docker"
    image, compose = ((folder / name).read_text() for name in ("gpu.Dockerfile", "compose.gpu.yaml"))
    jar = f"rapids-4-spark_2.13-{RAPIDS_VERSION}-cuda13.jar"
    assert re.search(rf"--checksum=sha256:[0-9a-f]{{64}} [^#]*/{RAPIDS_VERSION}/{jar} [^#]*/opt/rapids/{jar}\n", image)
    assert "FROM nvidia/cuda:13." in image
    assert ".[gpu-cu13," in image
    wanted = re.search(r"pyspark==([\d.]+)", image)
    assert wanted is not None
    assert wanted.group(1) in RAPIDS_SPARK_VERSIONS
    assert "/opt/rapids/conf/spark-defaults.conf" in image
    assert "SPARK_CONF_DIR: /opt/rapids/conf" in compose
    assert "dockerfile: docker/gpu.Dockerfile" in compose


def test_the_default_spark_is_one_that_the_plugin_supports() -> None:
    wanted = re.search(r'pyspark[^"]*==([\d.]+)', (Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert wanted is not None
    assert wanted.group(1) in RAPIDS_SPARK_VERSIONS
