"""Ctrl-C and signals: a line, the shell's exit status, and nothing left behind."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from gpu_ops.jobs import supervision
from gpu_ops.state import files

pytestmark = pytest.mark.thorough

OWNER = "import sys, time; from gpu_ops.state import files; print(files.temporary_folder(), flush=True); time.sleep(60)"


DEMO = ("demo", "--rows", "300000")


def on_a_terminal(after: float, folder: Path, arguments: Sequence[str] = DEMO, shown: bytes = b"") -> tuple[int, str]:
    """A command, Ctrl-C pressed after so many seconds: its exit status, and what was printed from then on.

    With `shown` the key is pressed when that has been printed, and the seconds are the most that are waited for it.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["TMPDIR"] = str(folder)
        os.environ.pop("JDK_JAVA_OPTIONS", None)  # Java says on the terminal that it has found them
        os.execv(sys.executable, [sys.executable, "-m", "gpu_ops.cli", *arguments])
    os.set_blocking(terminal, False)
    text, pressed, until = b"", 0, time.monotonic() + after
    while True:
        try:
            text += os.read(terminal, 1 << 16)
        except BlockingIOError:
            time.sleep(0.05)
        except OSError:  # the last process that had it is gone
            break
        if not pressed and (time.monotonic() > until or (shown and shown in text)):
            pressed = len(text)
            os.write(terminal, b"\x03")
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), text[pressed:].decode()


@pytest.mark.spark
@pytest.mark.parametrize(
    "seconds", [6, pytest.param(12, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.slow)]
)
def test_ctrl_c_in_a_terminal_is_one_line(seconds: int, tmp_path: Path) -> None:
    status, said = on_a_terminal(seconds, tmp_path)
    assert status == supervision.INTERRUPTED == 130
    assert said.count("\n") == 1, said
    assert said.endswith("stopped\r\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.spark
def test_a_result_is_on_the_terminal_until_ctrl_c(tmp_path: Path) -> None:
    job, temporary_files = tmp_path / "job.sql", tmp_path / "tmp"
    temporary_files.mkdir()
    example = [sys.executable, "-m", "gpu_ops.cli", "example"]
    job.write_text(subprocess.run(example, check=True, capture_output=True, text=True).stdout)
    run = ("run", str(job), "--show", "--master", "local[2]")
    status, said = on_a_terminal(100, temporary_files, run, shown=b" changes (1")  # inserted: ten, and more
    assert status == 130
    last = said.rstrip().splitlines()[-1]
    assert "stopped after: " in last or "stopped after" in last, said
    assert "Traceback" not in said
    assert "ERROR" not in said
    assert not list(temporary_files.iterdir())


def owner(folder: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has a temporary folder, and that folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(folder)}
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_left_goes_with_the_next_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path))
    (tmp_path / "gpu-join-not-ours").mkdir()  # without an owner's lock: somebody else's
    (gone, left), (lives, kept) = owner(tmp_path), owner(tmp_path)
    try:
        gone.send_signal(signal.SIGKILL)
        gone.communicate()
        assert left.is_dir()
        made = files.temporary_folder()
        assert {path.name for path in tmp_path.iterdir()} == {kept.name, made.name, "gpu-join-not-ours"}
        files.remove_temporary(made)
        assert not made.exists()
    finally:
        lives.kill()
        lives.communicate()


def test_a_process_that_ends_removes_its_folder(tmp_path: Path) -> None:
    code = OWNER.replace("time.sleep(60)", "")
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_programs_folders_go_with_its_state_server(number: int, tmp_path: Path) -> None:
    code = (
        "import time; from gpu_ops.spark.driver.process import Launcher; from gpu_ops.state import files;"
        "files.temporary_folder(); Launcher('t' * 32).start('cpu', 'cpu-0');"
        "print('listens', flush=True); time.sleep(60)"
    )
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        assert len(list(tmp_path.iterdir())) == 2
        process.send_signal(number)
    until = time.monotonic() + 20
    while list(tmp_path.iterdir()) and time.monotonic() < until:
        time.sleep(0.1)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_command_is_gone_with_its_errors(number: int, status: int, tmp_path: Path) -> None:
    """It is told to end with SIGTERM alone, and what its children say of that is not shown."""
    child = tmp_path / "gpu_ops"  # in place of the command line: a child of the child complains when it is stopped
    child.mkdir()
    (child / "__init__.py").touch()
    (child / "cli.py").write_text(
        "import os, subprocess, sys, time\n"
        "print('WARNING: Using incubator modules: jdk.incubator.vector\\nbefore', file=sys.stderr, flush=True)\n"
        "subprocess.Popen([sys.executable, '-c', 'import os, sys, time\\nwhile os.getppid() == ' + str(os.getpid()) + "
        "': time.sleep(0.1)\\nprint(\"Traceback\", file=sys.stderr)'])\n"
        "print('begun', flush=True)\n"
        "time.sleep(60)\n"
    )
    code = "import os, sys; from gpu_ops.jobs.supervision import run; os.chdir(sys.argv[1]); sys.exit(run(['demo']))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert (process.stdout.readline(), process.stderr.readline()) == ("begun\n", "before\n")
    process.send_signal(number)
    said, errors = process.communicate(timeout=30)
    assert (process.returncode, said, errors) == (status, "stopped\n", "")
