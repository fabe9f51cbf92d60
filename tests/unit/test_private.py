"""What other users of a machine can do with files and folders that lie where they may write."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import tempfile
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
from hpcdask.queues import local_processes
from hpcdask.runner.rendezvous import FileRendezvous, RendezvousInfo
from hpcdask.security import private
from hpcdask.security.credentials import (
    check_configuration,
    create_credentials,
    load_credentials,
    save_credentials,
)
from launching import wait_for
from strangers import UID, as_stranger, put_modules, root_only

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


def put_much(path: Path) -> None:
    with path.open("w") as file:
        file.truncate(1 << 40)
    path.chmod(0o600)


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
        (put_much, "has 1,099,511,627,776 bytes"),
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


def test_a_link_to_ones_own_scheduler_file_is_followed(tmp_path):
    (tmp_path / "real.json").write_text(FILE)
    (tmp_path / "link.json").symlink_to("real.json")
    assert scheduler_file.read(str(tmp_path / "link.json"))["address"] == "tcp://127.0.0.1:1"


# --- folders in which everybody may rename --------------------------------------------------------


def test_folders_in_which_any_user_may_rename_are_refused(open_folder):
    below = open_folder / "own"
    below.mkdir(mode=0o700)
    for folder in (open_folder, below):
        with pytest.raises(SchedulerFileError, match=rf"rename what lies in {open_folder} .*\+t"):
            scheduler_file.check_writable(str(folder / "cluster.json"))
        with pytest.raises(UsageError, match=f"rename what lies in {open_folder}"):
            scratch.scratch_folder(str(folder), lambda path: None)
    (open_folder.parent / "link").symlink_to(below)
    with pytest.raises(private.NotPrivate):
        private.refuse_open(str(open_folder.parent / "link"))
    open_folder.chmod(0o1777)
    private.refuse_open(str(below))


@root_only
def test_a_link_that_another_user_put_into_a_shared_folder_is_refused(open_folder):
    open_folder.chmod(0o1777)
    ours = open_folder / "ours"
    ours.mkdir(mode=0o700)
    as_stranger(lambda: (open_folder / "user").symlink_to(ours))
    for path in (open_folder / "user", open_folder / "user/below"):
        path.mkdir(exist_ok=True)
        with pytest.raises(private.NotPrivate, match=f"{open_folder}/user is a link of another"):
            private.refuse_open(str(path))
    private.refuse_open(str(ours))
    (open_folder / "mine").symlink_to(ours)
    private.refuse_open(str(open_folder / "mine"))


def swap(path: Path, other: Path) -> None:
    """Put another folder of the same user in the place of one."""
    path.rename(path.with_name("away"))
    other.rename(path)


RANK = """
import os, sys
from hpcdask import process
from hpcdask.bootstrap.janitor import MARKER, Janitor
os.environ[MARKER] = "nobody"
janitor = Janitor.start()
for path in sys.argv[1:]:
    janitor.remove_at_end(path)
print(process.owner_text(), flush=True)
sys.stdin.readline()
os._exit(0)
"""


@root_only
def test_a_janitor_removes_what_its_rank_made_and_nothing_in_its_place(open_folder):
    keys, own, thesis, also = (open_folder / name for name in ("c.keys", "own", "thesis", "also"))
    for path in (thesis, also):
        path.mkdir()
        (path / "chapter").mkdir()
        (path / "chapter" / "one.tex").write_text("precious")
    save_credentials(create_credentials(), str(keys))
    own.mkdir(mode=0o700)
    (own / "spilled").mkdir()
    (own / "spilled" / "block").touch()
    folders = [keys, own, open_folder / "other"]
    with subprocess.Popen(
        [sys.executable, "-c", RANK, *map(str, folders)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as rank:
        text = rank.stdout.readline().strip()
        (own / private.OWNER).write_text(text)
        (own / private.OWNER).chmod(0o600)
        (also / private.OWNER).write_text(f"{text}1")  # of another process
        as_stranger(lambda: swap(keys, thesis))
        also.rename(open_folder / "other")
        rank.communicate("\n", timeout=60)
    wait_for(lambda: not own.exists(), 30, "the rank's own folder to be removed")
    assert (keys / "chapter" / "one.tex").read_text() == "precious"
    assert (open_folder / "other" / "chapter" / "one.tex").read_text() == "precious"


@root_only
def test_a_scheduler_file_s_end_spares_what_lies_in_its_keys_place(open_folder):
    path, thesis = open_folder / "cluster.json", open_folder / "thesis"
    scheduler_file.write(str(path), "tls://127.0.0.1:1", create_credentials(), job=None)
    thesis.mkdir()
    (thesis / "chapter.tex").write_text("precious")
    as_stranger(lambda: swap(Path(f"{path}.keys"), thesis))
    scheduler_file.remove(str(path), "tls://127.0.0.1:1")
    assert not path.exists()
    assert Path(f"{path}.keys", "chapter.tex").read_text() == "precious"


def test_a_link_is_removed_and_not_followed(tmp_path):
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "ca.pem").touch()
    (tmp_path / "keys").symlink_to("thesis")
    private.remove(str(tmp_path / "keys"))
    assert os.listdir(tmp_path) == ["thesis"]
    assert os.listdir(tmp_path / "thesis") == ["ca.pem"]


@root_only
def test_what_is_swapped_while_it_is_removed_stays(open_folder, monkeypatch):
    keys, thesis = open_folder / "keys", open_folder / "thesis"
    thesis.mkdir()
    (thesis / "ca.pem").write_text("precious")
    save_credentials(create_credentials(), str(keys))
    real = os.listdir

    def swapped(folder: int) -> list[str]:
        found = real(folder)
        monkeypatch.undo()
        as_stranger(lambda: swap(keys, thesis))
        return found

    monkeypatch.setattr(os, "listdir", swapped)
    private.remove(str(keys))
    assert (keys / "ca.pem").read_text() == "precious"
    assert os.listdir(open_folder / "away") == []


@root_only
def test_a_link_that_comes_while_a_folder_is_removed_is_not_followed(open_folder, monkeypatch):
    keys, thesis = open_folder / "keys", open_folder.parent / "thesis"
    thesis.mkdir()
    (thesis / "ca.pem").write_text("precious")
    save_credentials(create_credentials(), str(keys))
    real = os.stat

    def swapped(path: str, **options: object) -> os.stat_result:
        found = real(path, **options)
        if path == "keys":
            monkeypatch.undo()
            keys.rename(open_folder / "away")
            as_stranger(lambda: keys.symlink_to(thesis))
        return found

    monkeypatch.setattr(os, "stat", swapped)
    private.remove(str(keys))
    assert (thesis / "ca.pem").read_text() == "precious"


@root_only
@pytest.mark.parametrize("what", ["keys", "note"])
def test_nothing_secret_is_written_into_a_folder_that_was_swapped(open_folder, monkeypatch, what):
    monkeypatch.setattr(tempfile, "tempdir", str(open_folder))
    meeting = FileRendezvous("launch", shared=False)
    folder = open_folder / "keys" if what == "keys" else Path(meeting.folder)
    theirs = open_folder / "theirs"
    as_stranger(theirs.mkdir)
    real = private.make_folder

    def swapped(path: str) -> int:
        found = real(path)
        as_stranger(lambda: swap(folder, theirs))
        return found

    monkeypatch.setattr(private, "make_folder", swapped)
    if what == "keys":
        save_credentials(create_credentials(), str(folder))
    else:
        meeting.publish(RendezvousInfo("10.0.0.1", 4711, "n1", "x", create_credentials()))
    assert os.listdir(folder) == []
    assert os.listdir(open_folder / "away")


def test_a_link_in_a_folder_of_ones_own_is_no_file_of_it(tmp_path):
    (tmp_path / "elsewhere").write_text("text")
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "ca.pem").symlink_to("../elsewhere")
    folder = private.open_folder(str(tmp_path / "keys"))
    with pytest.raises(OSError, match="symbolic links"):
        private.read("ca.pem", dir_fd=folder)
    os.close(folder)


@root_only
def test_keys_that_are_swapped_while_they_are_read_are_those_of_before(open_folder, monkeypatch):
    ours, theirs = create_credentials(), create_credentials()
    keys = open_folder / "keys"
    save_credentials(ours, str(keys))
    save_credentials(theirs, str(open_folder / "mine"))
    real = private.open_folder

    def opened(path: str) -> int:
        folder = real(path)
        monkeypatch.undo()
        as_stranger(lambda: swap(keys, open_folder / "mine"))
        return folder

    monkeypatch.setattr(private, "open_folder", opened)
    assert load_credentials(str(keys)) == ours
    assert load_credentials(str(keys)) == theirs


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


@pytest.fixture
def name() -> str:
    return f"test-{os.getpid()}"


@root_only
def test_folders_for_locks_are_at_home_where_a_stranger_took_the_name(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    usual = f"/tmp/hpcdask-{name}-{os.geteuid()}"
    try:
        assert private.node_folder(name) == usual
        assert mode(usual) == 0o700
        os.rmdir(usual)
        as_stranger(lambda: os.mkdir(usual))
        assert private.node_folder(name).startswith(f"{tmp_path}/.hpcdask/{name}-")
        monkeypatch.setattr(local_processes, "lock_folder", lambda: private.node_folder(name))
        ((uuid, lock),) = local_processes.lock_gpus(["GPU-1"], 1)
        os.close(lock)
        assert uuid == "GPU-1"
    finally:
        os.rmdir(usual)


@pytest.mark.parametrize("kind", ["link", "hard link", "pipe"])
def test_a_lock_is_a_file_of_that_name_alone(tmp_path, kind):
    victim = tmp_path / "thesis.tex"
    victim.write_text("precious")
    path = tmp_path / f"hpcdask-{os.getuid()}-GPU-1.lock"
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "hard link":
        path.hardlink_to(victim)
    else:
        os.mkfifo(path)
    gpus = [Gpu("GPU-1", "", 1), Gpu("GPU-2", "", 1)]
    assert locks.lock_gpus(gpus, 1, "job 9", str(tmp_path)) == gpus[1:]
    assert victim.read_text() == "precious"


# --- Dask's configuration -------------------------------------------------------------------------


IMPORTS = """
import os
os.umask(0)
from hpcdask.clusters import configuration
configuration.import_jobqueue("slurm")
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


WORKER = ["-m", "hpcdask.worker", "--scheduler", "tcp://127.0.0.1:1", "--cluster", "a-b-c"]
HOST = os.uname().nodename
CLUSTER = "import hpcdask; hpcdask.LocalCUDAJobCluster(1, device='cpu', cores=1, memory='1GiB')"


@pytest.mark.parametrize(
    ("command", "start", "code"),
    [
        (["-m", "hpcdask.run", "--device", "cpu", "program.py"], "hpcdask: error: ", 2),
        ([*WORKER, "--workers", "1", "--device", "cpu"], f"hpcdask: error: job 7 on {HOST}: ", 2),
        (["-c", CLUSTER], "hpcdask.errors.UsageError: ", 1),
    ],
    ids=["run", "job", "cluster"],
)
def test_a_configuration_of_others_is_refused_before_it_is_obeyed(tmp_path, command, start, code):
    config = tmp_path / "dask"
    config.mkdir()
    (config / "x.yaml").write_text(f"distributed:\n  scheduler:\n    preload: [{tmp_path}/own.py]")
    (config / "x.yaml").chmod(0o666)
    (tmp_path / "own.py").write_text(f"open('{tmp_path}/owned', 'w')")
    (tmp_path / "program.py").write_text("print('ran')")
    done = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "DASK_CONFIG": str(config), "HPCDASK_JOB_ID": "7"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert f"{start}others may write {config}/x.yaml" in done.stderr, done
    assert done.returncode == code
    assert not (tmp_path / "owned").exists()
    assert not done.stdout


# --- the current folder ---------------------------------------------------------------------------


PROGRAM = """
from contextlib import nullcontext
from distributed import Client
from hpcdask import Runner

def answer():
    import {beside}
    return {beside}.ANSWER

with Runner(device="cpu", tls=False) if "{how}" == "runner" else nullcontext():
    with Client() as client:
        print(client.submit(answer).result(), flush=True)
"""


@pytest.mark.parametrize("how", ["run", "runner"])
def test_a_run_takes_nothing_from_the_current_folder_that_is_installed(tmp_path, how):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    put_modules(here, "distributed", "yaml", "click", "multiprocessing")
    elsewhere.mkdir()
    (here / "only_here.py").write_text("ANSWER = 42")
    (elsewhere / "beside.py").write_text("ANSWER = 42")
    beside = "beside" if how == "run" else "only_here"
    program = elsewhere / "program.py"
    program.write_text(PROGRAM.format(how=how, beside=beside))
    options = ["-m", "hpcdask.run", "--device", "cpu", "--no-tls"] if how == "run" else []
    done = subprocess.run(
        [sys.executable, *options, str(program)],
        env={**os.environ, "OWNED": str(tmp_path / "owned"), "TMPDIR": "/tmp"},
        cwd=here,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout == "42\n", done.stderr
    assert not (tmp_path / "owned").exists()
    assert "hpcdask: warning: --no-tls: any user who reaches a port of this run" in done.stderr


@pytest.mark.parametrize(("bits", "there"), [(0o755, True), (0o1777, False)])
def test_a_current_folder_that_is_open_to_all_is_no_place_for_modules(tmp_path, bits, there):
    tmp_path.chmod(bits)
    program = "from hpcdask.bootstrap.reexec import *; add_working_folder(); print(sys.path)"
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, capture_output=True, text=True
    )
    assert (f"{str(tmp_path)!r}]\n" in done.stdout) is there, done


@pytest.mark.parametrize(("bits", "first"), [(0o755, True), (0o1777, False)])
def test_a_module_that_is_run_does_not_bring_a_folder_that_is_open_to_all(tmp_path, bits, first):
    """Such as ``python -m hpcdask.run -m program`` in /tmp."""
    tmp_path.chmod(bits)
    lines = "from hpcdask.runner.program import Program; Program('yaml', [], True).set_path()"
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{lines}; import sys; print(sys.path)"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.stdout.startswith(f"['{tmp_path}'") is first, done
    assert str(tmp_path) in done.stdout
