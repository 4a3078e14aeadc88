"""Values of options that stand elsewhere: what they may be, what is said where they are not, what hides them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from gpu_ops.errors import DescriptionError
from gpu_ops.jobs import runner
from gpu_ops.jobs.job import Job, load
from gpu_ops.jobs.secrets import Secrets
from gpu_ops.jobs.sql_text import JobError

SECRET = "pa'ss/wo rd+é\"{}"
TABLES = """
CREATE TABLE orders (id BIGINT) WITH ('connector' = 'json', 'path' = 'in', 'max_files_per_trigger' = '%s');
CREATE TABLE kept (id BIGINT, n BIGINT, PRIMARY KEY (id) NOT ENFORCED)
WITH ('connector' = 'jdbc', 'url' = 'jdbc:derby:memory:%s;create=true', 'table' = 'kept',
      'user' = 'a', 'password' = '%s');
SET state = 'state'; SET checkpoint = 'checkpoint';
INSERT INTO kept SELECT id, count(*) FROM orders GROUP BY id;
"""


def job_of(folder: Path, most: str = "1", name: str = "s", password: str = "${PASSWORD_OF_KEPT}") -> Job:
    (folder / "job.sql").write_text(TABLES % (most, name, password))
    return load(folder / "job.sql")


def test_a_value_is_in_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`'${VAR}'` was taken as it is, so that passwords stood in the job's file."""
    monkeypatch.setenv("PASSWORD_OF_KEPT", SECRET)
    job = job_of(tmp_path)
    assert job.sink.options["password"] == SECRET
    assert job.file.secrets.options == {"password"}
    (tmp_path / "word").write_text(f"{SECRET}\n")
    job = job_of(tmp_path, password="a${file:%s}-${PASSWORD_OF_KEPT}-$${HOME}$" % (tmp_path / "word"))
    assert job.sink.options["password"] == f"a{SECRET}-{SECRET}-${{HOME}}$"


@pytest.mark.parametrize(
    ("password", "words"),
    [
        ("${NOT_THERE}", r"the environment has no variable NOT_THERE"),
        ("${file:/not/there}", r"\$\{file:/not/there\} cannot be read: No such file"),
        ("${a-b}", r"write \$\{NAME\} for a variable of the environment"),
        ("${}", r"write \$\{NAME\}"),
        ("${NOT_CLOSED", r"write \$\{NAME\}"),
    ],
)
def test_a_value_that_is_nowhere_is_said_before_spark_starts(tmp_path: Path, password: str, words: str) -> None:
    with pytest.raises(JobError, match=words) as raised:
        job_of(tmp_path, password=password)
    assert raised.value.line == 5
    assert password in str(raised.value)


def test_no_error_shows_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOST", "s3cret-number")
    with pytest.raises(JobError, match=r"max_files_per_trigger is a whole number above zero, not '\*\*\*'") as raised:
        job_of(tmp_path, most="${MOST}", password="x")
    assert "s3cret" not in str(raised.value)


def test_every_spelling_of_a_value_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    secrets = Secrets()
    monkeypatch.setenv("LONG", SECRET)
    monkeypatch.setenv("SHORT", "x1")
    assert secrets.resolved("${LONG}${SHORT}") == SECRET + "x1"
    spelled = [SECRET, repr(SECRET), "pa%27ss/wo%20rd%2B%C3%A9%22%7B%7D", "pa%27ss%2Fwo%20rd%2B%C3%A9%22%7B%7D"]
    for text in spelled:
        assert "ss" not in secrets.hidden(f"begin{text}end")
    assert secrets.hidden("x1 ax1 'x1' x12") == "*** ax1 '***' x12"
    with pytest.raises(DescriptionError):
        secrets.resolved("${file:}")


@pytest.mark.spark
@pytest.mark.slow
def test_a_secret_is_in_nothing_that_a_job_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Output, explain, errors, Spark's events (what its UI shows), the checkpoint."""
    pytest.importorskip("pyspark")
    monkeypatch.setenv("MARK", "s3cret-mark")
    monkeypatch.setenv("BROKEN", "s3cret-broken")
    for folder in ("in", "events"):
        (tmp_path / folder).mkdir()
    (tmp_path / "in" / "1.json").write_text('{"id": 1}')
    text = (TABLES % ("1", "${MARK}", "${MARK}")).replace("'path' = 'in'", "'path' = 'in', 'option.mark' = '${MARK}'")
    (tmp_path / "job.sql").write_text(text)
    console = "'connector' = 'console', 'option.mark' = '${MARK}')"
    (tmp_path / "console.sql").write_text(
        text[: text.index("CREATE TABLE kept")]
        + f"""
        CREATE TABLE kept WITH ({console}; INSERT INTO kept SELECT id, count(*) FROM orders GROUP BY id;"""
    )
    (tmp_path / "broken.sql").write_text(text.replace("derby:memory:${MARK}", "derby:${BROKEN}:${BROKEN}"))
    events = ["--conf", "spark.eventLog.enabled=true", "--conf", f"spark.eventLog.dir=file://{tmp_path}/events"]
    events += ["--conf", "spark.eventLog.compress=false"]
    said = {}
    for name, *more in (("job", "--explain"), ("job",), ("console",), ("broken", "--state", "b", "--checkpoint", "c")):
        command = [sys.executable, "-m", "gpu_ops.cli", "run", f"{name}.sql", "--once", "--master", "local[2]"]
        done = subprocess.run(
            [*command, *events, *more], cwd=tmp_path, env=os.environ, capture_output=True, text=True, check=False
        )
        assert (done.returncode == 0) == (name != "broken"), done.stderr
        said[name, *more] = done.stdout + done.stderr
    assert "1 changes out" in said[("job",)]
    left = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert any(b"SQLExecutionStart" in content for content in left.values())
    for word in ("s3cret-mark", "s3cret-broken"):
        assert [name for name, text in said.items() if word in text] == []
        assert [path for path, content in left.items() if word.encode() in content] == []


@pytest.mark.spark
def test_explain_hides_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOLDER", "s3cret-folder")
    folder = tmp_path / "s3cret-folder"
    (folder / "in").mkdir(parents=True)
    job = tmp_path / "job.sql"
    job.write_text(TABLES.replace("'path' = 'in'", "'path' = '${FOLDER}/in', 'reader' = 'arrow'") % ("1", "s", "x"))
    monkeypatch.setattr(runner.gpu_ops, "explain", lambda _: f"files of {folder}/in")
    monkeypatch.setattr(runner, "changelog", lambda *_: None)
    monkeypatch.setattr(runner, "session_of", lambda *_: Console(quiet=True).status("no Spark"))
    assert runner.explain(load(job), Console(quiet=True)) == f"files of {tmp_path}/***/in"
