"""Commands that start Spark run in a session of their own, so that Ctrl-C in a terminal reaches this process alone.

Else it reaches every process of the command at once: Spark's handler interrupts a call into the JVM that is under way,
Python workers die in the middle of a write, and each prints its stack.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Final

from gpu_ops.state import files

_PIPE: Final = "GPU_JOIN_SUPERVISOR"
"""Names the pipe whose end tells the child that its supervisor is gone."""

_ENDING_S: Final = 10.0
"""How long Spark may take to end after its command was stopped."""

_NOISE: Final = b"WARNING: Using incubator modules: jdk.incubator.vector\n"
"""What a JVM that Spark 4 starts prints, with whatever log settings."""

INTERRUPTED: Final = 128 + signal.SIGINT
"""The exit status of a command that Ctrl-C ended, as shells have it."""


def supervised() -> bool:
    """True if this process is the child of `run`; from now on it ends when its supervisor does."""
    pipe = os.environ.pop(_PIPE, None)
    if pipe is None:
        return False
    threading.Thread(target=_follow, args=(int(pipe),), daemon=True).start()
    return True


def _follow(pipe: int) -> None:
    os.read(pipe, 1)  # nothing is ever written
    os.kill(os.getpid(), signal.SIGTERM)


def run(arguments: Sequence[str]) -> int:
    """Runs ``gpu-join`` in a session of its own, to its end or until this process is told to stop.

    The first Ctrl-C, or SIGTERM, lets the command stop in its own way; the second one ends it at once. Its temporary
    files are gone afterwards, in either case.

    Args:
        arguments: of the command line.

    Returns:
        Its exit status; `INTERRUPTED` where Ctrl-C ended it before it could stop in its own way.
    """
    asked: list[int] = []
    folder = files.temporary_folder()
    read, write = os.pipe()
    child = subprocess.Popen(  # noqa: S603 - this program
        [sys.executable, "-m", "gpu_ops.cli", *arguments],
        stderr=subprocess.PIPE,
        start_new_session=True,
        pass_fds=(read,),
        env={**os.environ, _PIPE: str(read), "TMPDIR": str(folder)},
    )
    os.close(read)

    def stop(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        with contextlib.suppress(ProcessLookupError):
            if len(asked) == 1:
                child.terminate()
            else:
                os.killpg(child.pid, signal.SIGKILL)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        errors = threading.Thread(target=_pass_on, args=(child, asked), daemon=True)
        errors.start()
        status = child.wait()
        errors.join(_ENDING_S)  # to its end: the JVM and its workers have it open as well
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(write)
        files.remove_temporary(folder)
    if not asked or status >= 0:
        return status if status >= 0 else 128 - status
    if sys.stdout.isatty():
        sys.stdout.write("\r\x1b[2K\x1b[?25h")  # what a progress display has left; the cursor that it hid
    sys.stdout.write("stopped\n")
    return 128 + asked[0]


def _pass_on(child: subprocess.Popen[bytes], asked: Sequence[int]) -> None:
    """Passes on what the child and those below it write to standard error, but for words about being stopped."""
    assert child.stderr is not None
    while text := os.read(child.stderr.fileno(), 1 << 16):
        if not asked:
            sys.stderr.buffer.write(text.replace(_NOISE, b""))
            sys.stderr.buffer.flush()
