"""A left join with state on a real YARN, in both deploy modes, and on a standalone master with two workers."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pyspark
import pytest
from oracle.drive import ADDS
from spark.support import slow_join

HERE, HOME = Path(__file__).parent, Path(pyspark.__file__).parent
PATHS = os.pathsep.join([str(HERE.parents[1]), str(HERE.parent)])
SETTINGS = {
    "spark.executor.instances": "2", "spark.executor.cores": "2", "spark.executor.memory": "512m",
    "spark.driver.memory": "512m", "spark.yarn.am.memory": "512m", "spark.cores.max": "4", "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1", "spark.sql.shuffle.partitions": "2",
    "spark.pyspark.python": sys.executable, "spark.executorEnv.PYTHONPATH": PATHS,
    "spark.yarn.appMasterEnv.PYTHONPATH": PATHS, "spark.yarn.jars": f"local:{HOME}/jars/*",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1",
    "spark.executor.extraJavaOptions": "-XX:TieredStopAtLevel=1",
}  # fmt: skip


@pytest.fixture(scope="session")
def yarn() -> Iterator[Path]:
    """The folder of its clients' configuration."""
    conf = Path(os.environ.get("GPU_JOIN_SERVICES", ""), "yarn", "conf").absolute()
    if "GPU_JOIN_SERVICES" not in os.environ or not (conf / "yarn-site.xml").exists():
        pytest.skip("no YARN: `make services` starts one, `make test-services` runs these tests")
    return conf


class Job:
    """A job's folder: inputs of some micro-batches, and what has to come out."""

    def __init__(self, folder: Path, seed: int = 1) -> None:
        self.folder, self.random = folder, random.Random(seed)
        self.live: dict[str, list[tuple[int, int | float]]] = {"left": [], "right": []}
        self.files = 0

    def add(self, micro_batches: int) -> None:
        """Writes random changes."""
        for _ in range(micro_batches):
            self.files += 1
            for side, column in (("left", "id"), ("right", "price")):
                lines = []
                for _ in range(40):
                    if self.live[side] and self.random.random() < 0.3:
                        row = self.live[side].pop(self.random.randrange(len(self.live[side])))
                        kind = "-D"
                    else:
                        row, kind = (self.random.randrange(20), self.random.randrange(100)), "+I"
                        self.live[side].append(row)
                    lines.append(json.dumps({"op": kind, "k": row[0], column: row[1]}))
                path = self.folder / side / f"{self.files:03}.json"
                path.parent.mkdir(exist_ok=True)
                path.write_text("\n".join(lines) + "\n")
                os.utime(path, (1_700_000_000 + self.files,) * 2)

    def run(self, master: str, *, mode: str = "client", conf: Path | None = None, **asked: object) -> None:
        """One run of it, which has to end well."""
        more = asked.pop("settings", {})
        assert isinstance(more, dict)
        settings = {**SETTINGS, "spark.yarn.stagingDir": f"file://{self.folder}/staging", **more}
        if mode == "cluster":
            settings = {k: v for k, v in settings.items() if not k.startswith("spark.driver.")}
        (self.folder / "job.json").write_text(json.dumps({"master": master, "settings": more, **asked}))
        command = [str(HOME / "bin" / "spark-submit"), "--master", master, "--deploy-mode", mode]
        for name, value in settings.items():
            command += ["--conf", f"{name}={value}"]
        environment = {**os.environ, "PYTHONPATH": PATHS, "PYSPARK_PYTHON": sys.executable, "SPARK_HOME": str(HOME)}
        if conf is not None:
            environment |= {"HADOOP_CONF_DIR": str(conf), "YARN_CONF_DIR": str(conf)}
        done = subprocess.run(
            [*command, str(HERE / "cluster_job.py"), str(self.folder)],
            env=environment, capture_output=True, text=True, timeout=400, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]

    def check(self) -> None:
        """The changes that were written, folded, are the join."""
        files = sorted((self.folder / "out").glob("*.parquet"))
        found: Counter[tuple[object, ...]] = Counter()
        for path in files:
            for row in pq.read_table(path).to_pylist():
                kind, *values = row.values()
                found[tuple(values)] += 1 if kind in ADDS else -1
        expected = slow_join("left", self.live["left"], self.live["right"], 2)
        assert expected
        assert sorted((+found).elements(), key=repr) == sorted(map(tuple, expected), key=repr)
        assert not -found


@pytest.fixture
def job(tmp_path: Path) -> Job:
    tmp_path.chmod(0o777)
    return Job(tmp_path)


@pytest.mark.parametrize("mode", ["client", "cluster"])
def test_yarn_goes_on_with_another_number_of_shuffle_partitions(yarn: Path, job: Job, mode: str) -> None:
    job.add(3)
    job.run("yarn", mode=mode, conf=yarn)
    job.check()
    job.add(3)
    job.run("yarn", mode=mode, conf=yarn, settings={"spark.sql.shuffle.partitions": "3"})
    job.check()


def test_standalone_goes_on(standalone: str, job: Job) -> None:
    job.add(3)
    job.run(standalone)
    job.add(3)
    job.run(standalone, settings={"spark.sql.shuffle.partitions": "3"})
    job.check()


@pytest.mark.parametrize("where", ["yarn", "standalone"])
def test_an_executor_is_lost_together_with_its_server(request: pytest.FixtureRequest, job: Job, where: str) -> None:
    """With executors excluded after the failure, too, as far as there are others."""
    made = request.getfixturevalue(where)
    job.add(6)
    excluded = {
        "spark.excludeOnFailure.enabled": "true",
        "spark.excludeOnFailure.application.maxFailedTasksPerExecutor": "1",
    }
    if where == "yarn":
        job.run("yarn", conf=made, kill=True, settings=excluded)
    else:
        job.run(made, kill=True, settings=excluded)
    assert (job.folder / "killed.json").exists()
    job.check()


def test_a_speculative_attempt_runs_beside_the_first(standalone: str, job: Job) -> None:
    """Both give the rows of one partition of a micro-batch, and one of them counts."""
    job.add(2)
    speculation = {
        "spark.speculation": "true", "spark.speculation.interval": "200ms", "spark.speculation.multiplier": "1.1",
        "spark.speculation.quantile": "0.3", "spark.speculation.minTaskRuntime": "100ms",
    }  # fmt: skip
    job.run(standalone, speculated=True, settings=speculation)
    attempts = [path.name.rsplit("-", 1)[0] for path in (job.folder / "attempts").iterdir()]
    assert max(Counter(attempts).values()) > 1, sorted(attempts)
    job.check()
