"""What other users of a machine can do with files and folders that lie where they may write."""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import dask.config
import pytest

from hpcdask import process
from hpcdask.client import scheduler_file
from hpcdask.client.connect import connect
from hpcdask.errors import SchedulerFileError, UsageError
from hpcdask.gpu import locks
from hpcdask.gpu.devices import Gpu
from hpcdask.node import scratch
from hpcdask.security import private
from hpcdask.security.credentials import (
    check_configuration,
    create_credentials,
    save_credentials,
)
from launching import wait_for
from strangers import UID, as_stranger, root_only

FILE = json.dumps({"address": "tcp://127.0.0.1:1"})


def mode(path: str | Path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.fixture(params=[0o000, 0o022])
def umask(request):
    before = os.umask(request.param)
    yield
    os.umask(before)


# --- a scheduler file that somebody gave ----------------------------------------------------------


def put(text: str, mode: int) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(text)
        path.chmod(mode)

    return write


def put_foreign(path: Path) -> None:
    path.write_text(FILE)
    os.chown(path, UID, UID)


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (lambda path: os.mkfifo(path, 0o600), "is no plain file"),
        (lambda path: path.symlink_to("/dev/zero"), "is no plain file"),
        (put("[" * 500_000, 0o600), "is not a scheduler file"),
        (put(FILE, 0o666), "may be changed by others: chmod go-w"),
        pytest.param(put_foreign, f"belongs to another user .uid {UID}", marks=root_only),
    ],
    ids=["pipe", "zeros", "depth", "open", "foreign"],
)
def test_what_is_no_scheduler_file_of_ones_own_is_refused_at_once(tmp_path, put, message):
    path = tmp_path / "cluster.json"
    put(path)
    for use in (connect, scheduler_file.check_writable):
        with pytest.raises(SchedulerFileError, match=message):
            use(str(path))


# --- folders in which everybody may rename --------------------------------------------------------


def test_folders_in_which_any_user_may_rename_are_refused(open_folder):
    below = open_folder / "own"
    below.mkdir(mode=0o700)
    for folder in (open_folder, below):
        with pytest.raises(SchedulerFileError, match=rf"rename what lies in {open_folder} .*\+t"):
            scheduler_file.check_writable(str(folder / "cluster.json"))
        with pytest.raises(UsageError, match=f"rename what lies in {open_folder}"):
            scratch.scratch_folder(str(folder), lambda path: None)
    open_folder.chmod(0o1777)
    private.refuse_open(str(below))


RANK = """
import os, sys
from hpcdask import process
from hpcdask.bootstrap import janitor
if sys.argv[1] == "immortal":  # as if a process could not be killed
    janitor.KILL_DEADLINE_S = 3
    janitor.marked_processes = lambda *_: [2**22]
made = janitor.Janitor("nobody")
for path in sys.argv[2:]:
    made.remove_at_end(path)
print(process.owner_text(), flush=True)
sys.stdin.readline()
os._exit(0)
"""


@contextlib.contextmanager
def rank(kind: str, *paths: Path) -> Iterator[str]:
    """A process whose janitor removes these; its owner's text."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", RANK, kind, *paths], **pipes) as process:
        yield process.stdout.readline().strip()
        process.communicate("\n", timeout=60)


def test_a_janitor_removes_what_its_rank_made_and_nothing_in_its_place(tmp_path):
    """The user has put a folder of their own in the place of two of them."""
    keys, own, thesis, other = (tmp_path / name for name in ("c.keys", "own", "thesis", "other"))
    save_credentials(create_credentials(), str(keys))
    for path in (own, thesis, other):
        (path / "chapter").mkdir(parents=True)
        (path / "chapter" / "one.tex").touch()
    with rank("mortal", keys, own, thesis, other) as text:
        (own / private.OWNER).write_text(text)
        (other / private.OWNER).write_text(f"{text}1")  # of another process
    wait_for(lambda: not own.exists(), 30, "the rank's own folder to be removed")
    wait_for(lambda: not keys.exists(), 30, "its keys to be removed")
    assert (thesis / "chapter" / "one.tex").exists()
    assert (other / "chapter" / "one.tex").exists()


def test_what_another_cluster_may_write_anew_is_removed_at_once(tmp_path):
    """The scheduler file of a second run went when the first one's processes had ended."""
    now, later = tmp_path / "cluster.json", tmp_path / os.fsdecode(b"caf\xe9")
    now.write_text("")
    later.mkdir()
    with rank("immortal", now, later):
        pass
    wait_for(lambda: not now.exists(), 2, "the file to be removed")
    assert later.exists()
    now.write_text("of the next cluster")
    wait_for(lambda: not later.exists(), 20, "the folder to be removed")
    assert now.exists()


def test_a_link_is_removed_and_not_followed(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "ca.pem").touch()
    (tmp_path / "keys").symlink_to("thesis")
    private.remove(str(tmp_path / "keys"))
    assert os.listdir(tmp_path) == ["thesis"]
    assert os.listdir(tmp_path / "thesis") == ["ca.pem"]


# --- scratch --------------------------------------------------------------------------------------


def test_new_folders_are_private_whatever_the_umask_says(tmp_path, umask):
    base = tmp_path / "new" / "disk"
    folder = scratch.scratch_folder(str(base), lambda path: None)
    assert {mode(path) for path in (base, base.parent, folder)} == {0o700}
    (Path(folder) / "spilled").mkdir()
    private.remove(folder, "of another process")
    private.remove(folder)
    assert set(os.listdir(folder)) == {"spilled", private.OWNER}
    private.remove(folder, process.owner_text())
    assert not Path(folder).exists()


def test_what_a_dead_process_left_is_purged_and_nothing_else(tmp_path):
    name = f"hpcdask-{os.getuid()}-"
    here = process.owner_text().rsplit(" ", 2)[0]
    for end, owner in (("dead", f"{here} 1 0"), ("mine", process.owner_text())):
        (tmp_path / f"{name}{end}").mkdir()
        (tmp_path / f"{name}{end}" / "spilled").mkdir()
        (tmp_path / f"{name}{end}" / private.OWNER).write_text(owner)
    scratch.remove_stale(str(tmp_path))
    assert os.listdir(tmp_path) == [f"{name}mine"]


# --- locks of GPUs --------------------------------------------------------------------------------


@root_only
def test_a_folder_for_locks_whose_name_a_stranger_took_is_refused():
    name = f"test-{os.getpid()}"
    usual = f"/tmp/hpcdask-{name}-{os.geteuid()}"
    try:
        assert private.node_folder(name) == usual
        assert mode(usual) == 0o700
        os.rmdir(usual)
        as_stranger(lambda: os.mkdir(usual))
        with pytest.raises(private.NotPrivate, match=f"another user .uid {UID}"):
            private.node_folder(name)
    finally:
        os.rmdir(usual)


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_lock_is_a_file_of_that_name_alone(tmp_path, kind):
    victim = tmp_path / "thesis.tex"
    victim.write_text("precious")
    path = tmp_path / f"hpcdask-{os.getuid()}-GPU-1.lock"
    if kind == "link":
        path.symlink_to(victim)
    else:
        os.mkfifo(path)
    gpus = [Gpu("GPU-1", "", 1), Gpu("GPU-2", "", 1)]
    assert locks.lock_gpus(gpus, 1, "job 9", str(tmp_path)) == gpus[1:]
    assert victim.read_text() == "precious"


# --- Dask's configuration -------------------------------------------------------------------------


IMPORTS = """
import os
os.umask(0)
from hpcdask.clusters import options
options.import_jobqueue("slurm")
assert os.umask(0) == 0
"""


def test_dask_jobqueue_writes_its_configuration_for_its_user_alone(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS],
        env={**os.environ, "HOME": str(home)},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr
    assert mode(home / ".config/dask") == 0o700
    assert mode(home / ".config/dask/jobqueue.yaml") == 0o600


@pytest.mark.parametrize(
    ("which", "name"),
    [("folder", "a.yaml"), ("file", "a.yaml"), ("file", "A.YML"), ("file", "[b]/a.yaml")],
)
def test_configuration_that_others_may_write_is_refused(tmp_path, monkeypatch, which, name):
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    monkeypatch.setattr(dask.config, "paths", [str(tmp_path / "none"), str(file.parent)])
    file.write_text("jobqueue:\n  slurm:\n    job-script-prologue: [touch /tmp/owned]\n")
    check_configuration()
    opened = tmp_path if which == "folder" else file
    opened.chmod(0o777)
    with pytest.raises(UsageError, match=rf"others may write {re.escape(str(opened))}, .*: chmod"):
        check_configuration()


# --- the current folder ---------------------------------------------------------------------------


PATHS = """
from hpcdask.bootstrap.environment import *
from hpcdask.runner.options import Program
before = list(sys.path)
add_working_folder()
print(sys.path[-1])
sys.path[:] = before
Program("yaml", [], True).set_path()  # as in: python -m hpcdask.run -m program
print(sys.path[0])
assert os.getcwd() in sys.path
"""


@pytest.mark.parametrize(("bits", "there"), [(0o755, True), (0o1777, False)])
def test_a_current_folder_that_is_open_to_all_is_no_place_for_modules(tmp_path, bits, there):
    tmp_path.chmod(bits)
    command = [sys.executable, "-P", "-c", PATHS]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    last, first = done.stdout.splitlines()
    assert ((last == str(tmp_path)), (first == str(tmp_path))) == (there, there), done
