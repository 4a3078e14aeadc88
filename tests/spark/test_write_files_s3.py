"""`gpu_ops.write_files` to an object store: each change once, through restarts, repeated and broken micro-batches."""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.dataset as ds
import pyarrow.fs as pafs
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions as f

import gpu_ops
from gpu_ops.errors import DescriptionError, NotBuiltError
from gpu_ops.spark.sinks import files as sink
from gpu_ops.spark.tasks.file import WrittenFile
from gpu_ops.state.files import Files
from spark.support import Row
from spark.test_write_files import CHANGES, Written, folded, same

moto = pytest.importorskip("moto.server")

pytestmark = [pytest.mark.spark, pytest.mark.thorough]

KEY, SECRET = "key", "secret"


class Store:
    """S3, as Arrow sees it, and how a user says where it is."""

    def __init__(self, endpoint: str) -> None:
        self.options = {"endpoint_override": endpoint, "scheme": "http", "region": "us-east-1"}
        self.files = pafs.S3FileSystem(access_key=KEY, secret_key=SECRET, allow_bucket_creation=True, **self.options)
        bucket = f"b{uuid.uuid4().hex[:8]}"  # all of moto's servers are one store
        self.files.create_dir(bucket)
        self.root = f"{bucket}/a b"
        said = "&".join(f"{name}={value}" for name, value in self.options.items())
        self.uri = f"s3://{KEY}:{SECRET}@{bucket}/a%20b?{said}"

    def objects(self) -> dict[str, bytes]:
        """By their names below the output folder."""
        found = self.files.get_file_info(pafs.FileSelector(self.root, recursive=True, allow_not_found=True))
        names = [x.path for x in found if x.type == pafs.FileType.File]
        return {name[len(self.root) + 1 :]: self.files.open_input_file(name).read() for name in names}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setattr(logging.getLogger("werkzeug"), "disabled", True)
    server = moto.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    yield Store("{}:{}".format(*server.get_host_and_port()))
    server.stop()


class OnS3(Written):
    """A join's changelog in files there."""

    def __init__(self, spark: Any, folder: Path, store: Store, format: str = "parquet", **options: Any) -> None:  # noqa: A002
        super().__init__(spark, folder, format, **options)
        self.store, self.copy = store, folder / "copy"
        self.folder = store.uri.replace("s3:", "s3a:", 1)

    def in_bucket(self) -> list[Row]:
        """By who takes no notice of the log."""
        found = ds.dataset(self.store.root, format=self.format, partitioning="hive", filesystem=self.store.files)
        return [tuple(row.values()) for row in found.to_table(columns=CHANGES).to_pylist()]

    def by_log(self) -> list[Row]:
        """By Spark, which goes by the log; there is no S3 to Spark here, so of a copy."""
        there = f"s3a://{self.store.root}/".replace(" ", "%20").encode()
        for name, content in self.store.objects().items():
            target = self.copy / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if name.startswith("_spark_metadata/"):
                content = content.replace(there, f"file:{self.copy}/".encode())  # noqa: PLW2901
            target.write_bytes(content)
        return [tuple(row) for row in self.spark.read.parquet(str(self.copy)).select(*CHANGES).collect()]


def test_every_change_once_through_restarts_and_repeated_micro_batches(
    spark: Any, tmp_path: Path, store: Store
) -> None:
    written = OnS3(spark, tmp_path, store, partition_by="folder")
    written.changes = written.changes.withColumn("folder", f.concat(f.lit("a b%ü=/"), f.col("item")))
    written.run(2)
    first = written.in_bucket()
    assert len(first) > 10
    same(first, written.by_log())
    written.forget(1)  # done, and Spark does not know it
    written.run()
    same(first, written.in_bucket())
    written.run(9)
    same(written.in_bucket(), written.by_log())
    assert folded(written.by_log()) == written.shop.expected()
    names = set(store.objects())
    assert {"_spark_metadata/8", "_spark_metadata/9.compact", "_spark_metadata/10"} < names
    assert not [name for name in names if name.startswith("_staging")]


@pytest.mark.slow
def test_each_tenth_entry_of_the_log_has_all_files(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink, "_KEPT_S", -60)
    log, names = sink.ObjectLog(Files.at(store.uri)), list[str]()
    for number in range(32):
        files = [WrittenFile(f"part-{number}-{n}", "", 1, {}, {}) for n in range(number % 3)]
        assert log.add(number, files)
        name = f"_spark_metadata/{number}" + (".compact" if number % 10 == 9 else "")
        said = store.objects()[name].split(b"\n")
        assert said[0] == b"v1"
        found = [json.loads(line)["path"].rpartition("/")[2] for line in said[1:]]
        names += [file.path for file in files]
        assert found == (names if number % 10 == 9 else [file.path for file in files])
    entries = {name.rpartition("/")[2] for name in store.objects()}
    assert entries == {"19.compact", *map(str, range(20, 29)), "29.compact", "30", "31"}
    again = sink.ObjectLog(Files.at(store.uri))
    assert again.latest() == 31
    assert not again.add(31, []), "another has written it"


@pytest.mark.parametrize("moment", ["add", *(pytest.param(one, marks=pytest.mark.slow) for one in ("_move", "tidy"))])
def test_a_commit_that_breaks_off_is_made_again(
    spark: Any, tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    written = OnS3(spark, tmp_path, store, "arrow" if moment == "add" else "parquet")
    written.run(1)
    owner: Any = sink.ObjectLog if moment == "add" else sink._LogCommit
    kept, calls = getattr(owner, moment), []

    def broken(*args: Any) -> Any:
        calls.append(args)
        if moment != "_move" or len(calls) > 1:
            raise OSError("the machine goes down")
        return kept(*args)

    with monkeypatch.context() as patch:
        patch.setattr(owner, moment, broken)
        with pytest.raises(StreamingQueryException, match="the machine goes down"):
            written.run(1)
    written.run(1)
    assert folded(written.in_bucket()) == written.shop.expected()
    if moment != "add":
        same(written.in_bucket(), written.by_log())


def test_a_delta_table(spark: Any, tmp_path: Path, store: Store) -> None:
    deltalake = pytest.importorskip("deltalake")
    written = OnS3(spark, tmp_path, store, "delta", partition_by="item")
    written.run(2)
    written.forget(1)
    written.run(1)
    options = {
        "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{store.options['endpoint_override']}", "AWS_ALLOW_HTTP": "true",
    }  # fmt: skip
    table = deltalake.DeltaTable(f"s3://{store.root}", storage_options=options).to_pyarrow_table(columns=CHANGES)
    rows = [tuple(row.values()) for row in table.to_pylist()]
    assert folded(rows) == written.shop.expected()


def test_what_cannot_be_reached_is_refused(spark: Any, tmp_path: Path) -> None:
    changes = Written(spark, tmp_path, "parquet").changes
    with pytest.raises(NotBuiltError, match=r"by Arrow, which cannot reach hdfs://nowhere/x from here"):
        gpu_ops.write_files(changes, "hdfs://nowhere/x")
    with pytest.raises(DescriptionError, match="path='oss://b/x' cannot be opened: there is no file system 'oss'"):
        gpu_ops.write_files(changes, "oss://b/x")
    with pytest.raises(NotBuiltError, match="format='delta' writes to local folders and s3://, not to gs://b/x"):
        gpu_ops.write_files(changes, "gs://anonymous@b/x", format="delta")
