"""What other users of a machine can do with files and folders that lie where they may write."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
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


def put_pipe(path: Path) -> None:
    os.mkfifo(path, 0o600)


def put_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def put_depth(path: Path) -> None:
    path.write_text("[" * 500_000)
    path.chmod(0o600)


def put_open(path: Path) -> None:
    path.write_text(FILE)
    path.chmod(0o666)


def put_foreign(path: Path) -> None:
    path.write_text(FILE)
    os.chown(path, UID, UID)


@pytest.mark.parametrize(
    ("put", "message"),
    [
        (put_pipe, "is no plain file"),
        (put_zeros, "is no plain file"),
        (put_depth, "is not a scheduler file"),
        (put_open, "may be changed by others: chmod go-w"),
        pytest.param(put_foreign, f"belongs to another user .uid {UID}", marks=root_only),
    ],
)
def test_what_is_no_scheduler_file_of_ones_own_is_refused_at_once(tmp_path, put, message):
    path = tmp_path / "cluster.json"
    put(path)
    with pytest.raises(SchedulerFileError, match=message):
        connect(str(path))
    with pytest.raises(SchedulerFileError, match=message):
        scheduler_file.check_writable(str(path))


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
from hpcdask.bootstrap.janitor import Janitor
janitor = Janitor("nobody")
for path in sys.argv[1:]:
    janitor.remove_at_end(path)
print(process.owner_text(), flush=True)
sys.stdin.readline()
os._exit(0)
"""


def test_a_janitor_removes_what_its_rank_made_and_nothing_in_its_place(tmp_path):
    """The user has put a folder of their own in the place of two of them."""
    keys, own, thesis, other = (tmp_path / name for name in ("c.keys", "own", "thesis", "other"))
    save_credentials(create_credentials(), str(keys))
    for path in (own, thesis, other):
        (path / "chapter").mkdir(parents=True)
        (path / "chapter" / "one.tex").touch()
    with subprocess.Popen(
        [sys.executable, "-c", RANK, *map(str, (keys, own, thesis, other))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as rank:
        text = rank.stdout.readline().strip()
        (own / private.OWNER).write_text(text)
        (other / private.OWNER).write_text(f"{text}1")  # of another process
        rank.communicate("\n", timeout=60)
    wait_for(lambda: not own.exists(), 30, "the rank's own folder to be removed")
    wait_for(lambda: not keys.exists(), 30, "its keys to be removed")
    assert (thesis / "chapter" / "one.tex").exists()
    assert (other / "chapter" / "one.tex").exists()


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


@pytest.mark.parametrize(("bits", "there"), [(0o755, True), (0o1777, False)])
def test_a_current_folder_that_is_open_to_all_is_no_place_for_modules(tmp_path, bits, there):
    tmp_path.chmod(bits)
    program = "from hpcdask.bootstrap.environment import *; add_working_folder(); print(sys.path)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert (f"{str(tmp_path)!r}]\n" in done.stdout) is there, done


@pytest.mark.parametrize(("bits", "first"), [(0o755, True), (0o1777, False)])
def test_a_module_that_is_run_does_not_bring_a_folder_that_is_open_to_all(tmp_path, bits, first):
    """Such as ``python -m hpcdask.run -m program`` in /tmp."""
    tmp_path.chmod(bits)
    lines = "from hpcdask.runner.options import Program; Program('yaml', [], True).set_path()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{lines}; import sys; print(sys.path)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith(f"['{tmp_path}'") is first, done
    assert str(tmp_path) in done.stdout
