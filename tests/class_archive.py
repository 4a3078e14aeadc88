"""Java's archive of the classes that a query loads: a session starts in half the time, and tests start a hundred.

    python tests/class_archive.py FILE

It is Java's own (class data sharing, JEP 350), and left aside where Java or the jars are others. `conftest` names it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from gpu_ops import spark


def main(archive: Path) -> None:
    """Run a query, whose virtual machine leaves the archive when it ends."""
    options = f"-XX:TieredStopAtLevel=1 -XX:ArchiveClassesAtExit={archive} -Xlog:cds=off -Xlog:cds+dynamic=off"
    with tempfile.TemporaryDirectory() as folder:
        config = {"spark.driver.extraJavaOptions": options, "spark.sql.warehouse.dir": folder}
        session = spark.session("classes", master="local[2]", config=config)
        sides = []
        for column in ("price", "paid"):
            path = Path(folder, column)
            path.mkdir()
            (path / "0.json").write_text(f'{{"id": 1, "{column}": 2}}\n')
            sides.append(session.readStream.schema(f"id long, {column} long").json(str(path)))
        joined = spark.join(*sides, on="id", how="left", state=f"{folder}/state")
        query = joined.writeStream.format("memory").queryName("joined")
        running = query.option("checkpointLocation", str(Path(folder, "checkpoint"))).start()
        running.processAllAvailable()
        session.sql("SELECT count(*) FROM joined GROUP BY id").toPandas()
        running.stop()
        machine = session.sparkContext._gateway.proc
        session.stop()
        machine.stdin.close()  # then it ends
        machine.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
