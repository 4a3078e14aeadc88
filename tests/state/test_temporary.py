"""Temporary folders where anybody may write: a living owner keeps its own, a dead one's goes, another user's stays."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_ops.errors import StateError
from gpu_ops.state import files

NOBODY = 65534


def fifo(lock: Path) -> None:
    os.mkfifo(lock)


def link_to_a_file_of_ours(lock: Path) -> None:
    (lock.parents[1] / "ours").touch()
    lock.symlink_to(lock.parents[1] / "ours")


def second_name_of_a_file_of_ours(lock: Path) -> None:
    (lock.parents[1] / "ours").touch()
    os.link(lock.parents[1] / "ours", lock)


def listening(lock: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(lock))


@pytest.mark.parametrize("made", [fifo, link_to_a_file_of_ours, second_name_of_a_file_of_ours, listening, Path.mkdir])
@pytest.mark.parametrize("name", ["gpu-join-theirs", ".gpu-join-theirs"])
def test_another_user_s_folder_is_left_alone(made: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    """A pipe called .owner made every start wait without end; a link to a file of ours had us delete their folder."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / "theirs").touch()
    made(folder / ".owner")
    os.utime(folder, (1e9, 1e9))
    if os.getuid() == 0:
        os.chown(folder, NOBODY, NOBODY)
    else:
        folder.chmod(0o777)  # others may have put into it what they like
    files.remove_abandoned(tmp_path)
    assert (folder / "theirs").exists()


@pytest.mark.parametrize("made", [fifo, link_to_a_file_of_ours, listening, Path.mkdir])
def test_a_folder_of_ours_with_a_strange_owner_is_left_alone(made: Callable[[Path], None], tmp_path: Path) -> None:
    folder = tmp_path / "gpu-join-strange"
    folder.mkdir(0o700)
    made(folder / ".owner")
    files.remove_abandoned(tmp_path)
    assert folder.exists()


def test_a_link_to_a_folder_is_not_followed(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir(0o700)
    (own / ".owner").touch()
    (tmp_path / "gpu-join-link").symlink_to(own)
    files.remove_abandoned(tmp_path)
    assert (own / ".owner").exists()


def test_a_folder_has_its_name_only_once_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two programs that start together the second removed what the first had not locked yet."""
    lock, seen = files.fcntl.flock, list[list[str]]()

    def slow(handle: int, how: int) -> None:
        seen.append([path.name for path in tmp_path.glob("gpu-join-*")])
        files.remove_abandoned(tmp_path)  # what another program does that starts now
        lock(handle, how)

    monkeypatch.setattr(files.fcntl, "flock", slow)
    made = files.temporary_folder(tmp_path)
    assert made.is_dir()
    assert made.name.startswith("gpu-join-")
    assert seen[0] == []
    files.remove_temporary(made)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lock", [True, False])
def test_what_a_program_left_that_was_killed_while_it_made_one(lock: bool, tmp_path: Path) -> None:
    left = tmp_path / ".gpu-join-left"
    left.mkdir(0o700)
    if lock:
        (left / ".owner").touch()
    files.remove_abandoned(tmp_path)
    assert left.exists()  # it may be at it
    os.utime(left, (time.time() - 4000,) * 2)
    files.remove_abandoned(tmp_path)
    assert not left.exists()


def test_a_program_that_is_killed_while_it_removes_its_folder_leaves_what_says_whose_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, removed = files.temporary_folder(tmp_path), list[str]()
    for number in range(20):
        (made / str(number)).mkdir()
    monkeypatch.setattr(files.shutil, "rmtree", lambda path, **_: removed.append(path.name))
    files.remove_temporary(made)
    assert sorted(removed[:-1]) == sorted(map(str, range(20)))
    assert removed[-1] == made.name
    monkeypatch.undo()
    files.remove_abandoned(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_folder_that_a_cleaner_has_removed_is_made_anew(tmp_path: Path) -> None:
    made = files.temporary_folder(tmp_path / "gone" / "too")
    assert made.is_dir()
    assert (tmp_path / "gone").stat().st_mode & 0o777 == 0o700
    files.remove_temporary(made)


def test_where_none_can_be_made_the_error_says_where(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StateError, match=r"no temporary folder can be made in .*/file: .*"):
        files.temporary_folder(tmp_path / "file")


MANY = """
import os, pathlib, random, signal, sys, time
from gpu_ops.state import files
where, seed, rounds = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
choice, lost, killed = random.Random(seed), 0, 0
for number in range(rounds):
    running = set()
    for _ in range(choice.randrange(2, 9)):
        own, life, end = choice.getrandbits(32), choice.random() / 50, choice.choice(["remove", "exit", "die", "stay"])
        child = os.fork()
        if child:
            running.add(child)
            continue
        made = files.temporary_folder(where)
        (made / "rows").mkdir()
        (made / "rows" / "some").write_text(str(own))
        time.sleep(life)
        try:
            fine = (made / "rows" / "some").read_text() == str(own) and (made / ".owner").exists()
        except OSError:
            fine = False
        if end == "stay":
            time.sleep(0.05)
            fine = fine and (made / "rows" / "some").exists()
        if end == "remove":
            files.remove_temporary(made)
        if end == "die":
            os.kill(os.getpid(), signal.SIGKILL if fine else signal.SIGTERM)
        os._exit(0 if fine else 1)
    for child in choice.sample(sorted(running), len(running) // 3):
        time.sleep(choice.random() / 50)
        os.kill(child, signal.SIGKILL)
        killed += 1
    for child in running:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        lost += status not in (0, -signal.SIGKILL)
print(lost, killed, flush=True)
"""


def many(where: Path, seed: int, rounds: int) -> None:
    """Programs start, end and are killed at random moments: no living one loses its folder, each dead one's goes."""
    where.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", MANY, str(where), str(seed), str(rounds)], check=True, capture_output=True, text=True
    )
    lost, killed = map(int, done.stdout.split())
    assert lost == 0, seed
    assert killed
    for path in where.glob(".gpu-join-*"):
        os.utime(path, (1e9, 1e9))  # killed before it had its name: an hour later
    files.remove_abandoned(where)
    assert list(where.iterdir()) == [], seed


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_programs_that_start_and_end_at_once(seed: int, tmp_path: Path) -> None:
    many(tmp_path / "folders", seed, 8 if seed == 1 else 40)


@pytest.mark.slow
def test_many_programs_that_start_and_end_at_once(tmp_path: Path) -> None:
    first = int(os.environ.get("GPU_JOIN_SEED", "100"))
    for seed in range(first, first + int(os.environ.get("GPU_JOIN_TRACES", "20"))):
        many(tmp_path / str(seed), seed, 200)
