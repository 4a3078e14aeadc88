"""State folders and strangers: one identity however a folder is written, secrets in no text, files for their owner."""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import re
import stat
import traceback
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import pyarrow as pa
import pyarrow.fs as pafs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pyspark.sql import types

from gpu_ops.errors import StateError
from gpu_ops.spark.driver.queries import JoinPlan
from gpu_ops.spark.driver.registry import JoinState
from gpu_ops.spark.server.rescale import rescale
from gpu_ops.spark.tasks.join import Task
from gpu_ops.spark.wire.command import ApplyCommand
from gpu_ops.spark.wire.connection import Address
from gpu_ops.state.address import StateAddress
from gpu_ops.state.files import Files
from gpu_ops.state.manifest import FINISHED
from state.support import make_command, make_join
from state.test_binding import folder_of

KEY, SECRET = "AKIDEXAMPLE", "wJalr/XUtn+FEMI=K7"
WRITTEN = SECRET.replace("/", "%2F").replace("+", "%2B").replace("=", "%3D")
S3 = f"s3://{KEY}:{WRITTEN}@bucket/a/state?endpoint_override=127.0.0.1:9&scheme=http"


def hidden(text: str) -> bool:
    """Whether neither the key nor a good part of the secret is in a text."""
    return not any(part in text for part in (KEY, "wJalr", "XUtn", "FEMI"))


# --- identity ------------------------------------------------------------------------------------


def test_one_folder_under_many_spellings_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each pair of these was taken for two folders, which two joins then wrote at once."""
    (tmp_path / "real" / "x").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "far" / "way").symlink_to(tmp_path / "real" / "x")
    monkeypatch.chdir(tmp_path / "real")
    monkeypatch.setenv("HOME", str(tmp_path / "real"))
    plain = f"{tmp_path}/real/st"
    spellings = [
        plain, Path(plain), plain + "/", plain + "//", "st", "./st", "x/../st", "st/.", "~/st",
        f"{tmp_path}//real/./st", f"/{plain}", f"{tmp_path}/link/st", f"{tmp_path}/link/x/../st",
        f"{tmp_path}/far/way/../st", f"{tmp_path}/far/deep/../../real/st",
        f"file:{plain}", f"file://{plain}", f"file:///{plain}", f"file:////{plain}", f"file://localhost{plain}",
        f"FILE:{plain}/",
        f"file:{tmp_path}/link/st", f"file://{tmp_path}/re%61l/st",
    ]  # fmt: skip
    (tmp_path / "real" / "st").mkdir()
    (tmp_path / "real" / "st" / "here").touch()
    for spelling in spellings:
        address = StateAddress.of(spelling)
        assert address.identity == f"file://{os.path.realpath(plain)}", spelling
        assert StateAddress.of(address.secret_uri) == address, "as a state server reads it"
        assert Files.at(spelling).sizes("") == {"here": 0}, spelling
    assert StateAddress.of("st2").identity != StateAddress.of("st").identity


@pytest.mark.parametrize(
    "spellings",
    [
        ["s3://b/x/y", "s3://b/x/y/", "S3://b//x/./y", "s3://me:pw@b/x/y", "s3://b/x/y?region=eu-west-1", "s3://b/%78/y"],
        ["s3://b/x?endpoint_override=h:9000", "s3://b/x?scheme=http&endpoint_override=H:9000",
         "s3://b/x?endpoint_override=http%3A%2F%2Fh%3A9000%2F"],
        ["gs://b/x", "gcs://b/x/", "gs://anonymous@b/x"],
        ["hdfs://nn:8020/x", "hdfs://NN/x", "hdfs://me@nn/x/", "hdfs://nn/x?replication=2"],
        ["abfss://c@a.dfs.core.windows.net/x", "abfs://c@A.dfs.core.windows.net/x/", "abfs://c:pw@a.dfs.core.windows.net/x"],
        ["hdfs:///x", "hdfs:/x"],
    ],
)  # fmt: skip
def test_one_uri_under_many_spellings_is_one(spellings: list[str]) -> None:
    assert len({StateAddress.of(spelling).identity for spelling in spellings}) == 1


@pytest.mark.parametrize(
    "others",
    [
        ["s3://b/x", "s3://b/X", "s3://c/x", "gs://b/x", "s3://b/x?endpoint_override=h", "s3://b/x/1", "hdfs://b/x"],
        ["abfs://c@a.dfs.core.windows.net/x", "abfs://d@a.dfs.core.windows.net/x"],
        ["hdfs://nn/x", "hdfs://nn:9000/x", "hdfs:///x", "/x", "x"],
    ],
)
def test_other_folders_are_others(others: list[str]) -> None:
    assert len({StateAddress.of(other).identity for other in others}) == len(others)


@pytest.mark.parametrize(
    ("location", "cure"),
    [
        ("dbfs:/x", "write /dbfs/"),
        ("dbfs:///x", "write /dbfs/"),
        ("s3a://b/x", "write s3://"),
        ("s3n://b/x", "write s3://"),
        ("S3A://b/x", "write s3://"),
        ("wasbs://c@a/x", "write abfss://"),
        ("file://x/y", "file:///"),
        ("file:x", "absolute path"),
        ("file:///a?b", "%3F"),
        ("file:///a#b", "%23"),
        ("s3:/b/x", "write s3://"),
        ("s3:b/x", "write s3://"),
        ("s3:///x", "name of a bucket"),
        ("s3://b/x/../y", "no .. in its path"),
        ("C:\\state", "no file system 'C'"),
        ("C:/state", "no file system 'C'"),
        ("nope://bucket/x", "no file system 'nope'"),
        ("nope:/x", r"write ./nope:"),
        ("://", "no file system ''"),
        ("hdfs://nn:port/x", "%3A"),
        ("", "names no folder"),
        (" ", "names no folder"),
        ("a\0b", "names no folder"),
        ("a\udc80b", "names no folder"),
        (5, "int"),
        (b"/x", "bytes"),
    ],
)
def test_what_is_no_state_folder_says_what_to_write(location: Any, cure: str, tmp_path: Path) -> None:
    with pytest.raises(StateError) as caught:
        Files.at(location)
    assert cure in str(caught.value)
    assert isinstance(location, (int, bytes)) or "A state folder is a local path or a file://" in str(caught.value)


def test_a_colon_in_a_local_name_is_no_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("12:30", "a:b", "./nope:/x"):
        assert StateAddress.of(name).path == os.path.normpath(tmp_path / name)


def test_a_relative_path_stays_where_it_was_declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    address = StateAddress.of("st")
    monkeypatch.chdir(tmp_path)
    assert address.path == f"{tmp_path}/a/st"
    assert StateAddress.of("st", seen_from=tmp_path / "a") == address
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(StateError, match="state='st' is relative, and the working folder is gone"):
        StateAddress.of("st")
    monkeypatch.chdir(tmp_path)


def test_a_folder_below_keeps_the_options() -> None:
    assert StateAddress.of("s3://b/x/?region=eu").below("1") == StateAddress.of("s3://b/x/1?region=eu")
    assert StateAddress.of("/x?y").below("1") == StateAddress.of("/x?y/1")
    assert StateAddress.of("file:/a b").below("1").path == "/a b/1"


# --- secrets -------------------------------------------------------------------------------------


def texts(value: object) -> list[str]:
    return [str(value), repr(value), f"{value}", f"{value!r}", "%s %r" % (value, value), "{}".format(value)]  # noqa: UP031, UP032


def test_secrets_are_in_no_text() -> None:
    address = StateAddress.of(S3)
    assert str(address) == "s3://bucket/a/state"
    command = make_command(0, S3)
    task = Task("t", {"join_id": "j", "state": address}, Address("grpc://h:1", "t"), None, pa.schema([]))  # type: ignore[arg-type]
    plan = JoinPlan("0", make_join(), "j", "cpu", 1, "", str(address), address.identity, False, (), ())
    carried = plan.carried_by(types.StructType([types.StructField("x", types.LongType())])).json()
    known = JoinState("q", "r", address, 1)
    files = Files(pafs.LocalFileSystem(), "/x", address)
    holders: list[object] = [address, command, task, vars(task), plan, carried, known, [address]]
    for holder in (*holders, files.name("x"), {1: address}):
        assert all(map(hidden, texts(holder))), type(holder)
    record = logging.LogRecord("n", logging.INFO, "p", 1, "%s %r", (address, address), None)
    assert hidden(record.getMessage())
    assert hidden(address.identity)
    assert pickle.loads(pickle.dumps(address)) == address
    assert ApplyCommand.parse(command.to_json().encode()) == command
    assert dataclasses.replace(command, state=address).state == StateAddress.of(address.secret_uri)
    assert pafs.FileSystem.from_uri(address.secret_uri)[1] == "bucket/a/state"


@pytest.mark.parametrize(
    "location",
    [
        f"nope://{KEY}:{WRITTEN}@bucket/s",
        f"s3a://{KEY}:{WRITTEN}@bucket/s",
        f"s3a://{KEY}:{SECRET}@bucket/s",
        f"s3://{KEY}:{SECRET}@bucket/s",  # whose / ends the name of the host
        f"s3://{KEY}:wJalr?XUtn@bucket/s",
        f"s3://{KEY}:wJalr#XUtn@bucket/s",
        f"s3://{KEY}:{WRITTEN}/bucket/s",  # without the @
        f"S3:{KEY}:{WRITTEN}@bucket/s",
        f"file://{KEY}:{WRITTEN}@host/s",
        f"s3://{KEY}:{WRITTEN}@bucket/s?secret_key=XUtn",
        f"s3://bucket/s?access_key={KEY}&secret_key={WRITTEN}",
        f"s3://bucket/s?session_token=x@{WRITTEN}",
        f"s3://{KEY}:{WRITTEN}@bu_ck%2Fet/s",
        f"hdfs://{KEY}:{WRITTEN}@host/s/../t",
        f"abfs://c:{WRITTEN}@account.dfs.core.windows.net/../x",
        f"s3://{KEY}:{WRITTEN}@[bucket/s",
        f"s3://{KEY}:{WRITTEN}@bucket/s\0",
        f"s3://{KEY}:{WRITTEN}\u2100@bucket/s",
    ],
)
def test_secrets_are_in_no_refusal(location: str) -> None:
    with pytest.raises(StateError) as caught:
        Files.at(location)
    assert hidden("".join(traceback.format_exception(caught.value)))


def test_other_errors_lose_the_secrets_they_quote(monkeypatch: pytest.MonkeyPatch) -> None:
    address = StateAddress.of(S3 + "&session_token=XUtn%2F1")
    said = f"{address.secret_uri} {KEY} {SECRET} {WRITTEN} XUtn/1 XUtn%2F1 127.0.0.1:9 http"
    assert address.without_secrets(said) == "s3://bucket/a/state *** *** *** *** *** 127.0.0.1:9 http"

    def fails(*_: object, **__: object) -> None:
        raise OSError(said)

    filesystem = type("Quoting", (), {"type_name": "s3"} | dict.fromkeys(
        ("get_file_info", "open_input_file", "open_output_stream", "delete_file", "delete_dir", "create_dir"), fails
    ))()  # fmt: skip
    files = Files(filesystem, "bucket/a/state", address)
    for call in (
        lambda: files.read("x"), lambda: files.stamp("x"), lambda: files.sizes(""), lambda: files.folders("p"),
        lambda: files.write("x", lambda file: file.write(b"y")), lambda: files.create("x", b"y"),
        lambda: files.delete(["x"]), lambda: files.delete_folder("p"),
    ):  # fmt: skip
        with pytest.raises(StateError, match="s3://bucket/a/state") as caught:
            call()
        assert hidden("".join(traceback.format_exception(caught.value)))


SCHEMES = ["s3", "s3a", "gs", "abfs", "abfss", "hdfs", "file", "nope", "S3", "dbfs", ""]


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(SCHEMES),
    st.text("wxyz/+=@:?#%&", min_size=1, max_size=12),
    st.booleans(),
    st.sampled_from(
        ["{0}:key:{1}@bucket/a", "{0}key:{1}@bucket/a?region=eu", "{0}bucket/a?secret_key={1}", "{0}:{1}@bucket",
         "{0}c:{1}@account.host/a/../b", "{0}key:{1}/bucket/a", "{0}bucket/a?b=c&session_token={1}&region=eu"]
    ),
)  # fmt: skip
def test_no_secret_shows_however_it_is_written(scheme: str, secret: str, encoded: bool, form: str) -> None:
    # else what is behind the @ is where it is
    assume(encoded or "@" not in secret or ("{1}@" in form and not set("/?#") & set(secret)))
    location = form.format(f"{scheme}://", quote(secret, safe="") if encoded else secret)
    try:
        address = StateAddress.of(location)
    except StateError as error:
        said = ["".join(traceback.format_exception(error))]
    else:
        assert StateAddress.of(address.secret_uri) == address
        assert address.below("1").identity != address.identity
        said = [*texts(address), address.identity, address.without_secrets(f"cannot open {address.secret_uri}")]
    for part in re.findall("[w-z]{2,}", secret):
        assert not any(re.search(rf"(?<![a-z]){part}(?![a-z])", text) for text in said), said


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.text(max_size=12), st.text("s3fileh:/.?#@[]%~ab\\\0\n", max_size=16)))
def test_any_text_is_an_address_or_refused(text: str) -> None:
    try:
        address = StateAddress.of(text)
    except StateError:
        return
    assert StateAddress.of(address.secret_uri) == address
    assert StateAddress.of(address.secret_uri).identity == address.identity
    assert address.path is None or address.path.startswith("/")


# --- permissions ---------------------------------------------------------------------------------


def test_state_is_for_its_owner_alone(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir(0o755)
    seen: set[int] = set()

    def modes(folder: Path) -> None:
        for path in folder.rglob("*"):
            wanted = stat.S_IFDIR | 0o700 if path.is_dir() else stat.S_IFREG | 0o600
            assert path.stat().st_mode == wanted, path
            seen.add(wanted)

    def half_way(file: IO[bytes]) -> None:
        file.write(b"y")
        modes(mine)

    before = os.umask(0)
    try:
        folder = folder_of(mine / "new" / "state")
        modes(mine)
        assert {path.suffix for path in folder.rglob("*")} == {"", ".json", ".arrow", ".snapshot"}
        rescale(folder, 3)
        Files.at(folder).write("further", half_way)
        Files.at(folder).create(FINISHED, b"{}")
        modes(mine)
    finally:
        os.umask(before)
    assert len(seen) == 2
    assert stat.S_IMODE(mine.stat().st_mode) == 0o755, "what was there stays as it was"
