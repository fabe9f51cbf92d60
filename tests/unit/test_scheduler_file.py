"""The scheduler file: who may write, read and trust it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import dask
import pytest
from distributed import Client, LocalCluster

import hpcdask
from clock import clock
from hpcdask.client import defaults, scheduler_file
from hpcdask.client.connect import load_security
from hpcdask.errors import SchedulerFileError
from hpcdask.jobs import access
from hpcdask.runner.run_files import RunFiles
from hpcdask.security import private
from hpcdask.security.credentials import (
    Credentials,
    create_credentials,
    save_credentials,
    to_security,
)

root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give files to another user")


@pytest.fixture(scope="module")
def credentials() -> Credentials:
    return create_credentials()


@pytest.fixture(scope="module")
def cluster(credentials) -> Iterator[LocalCluster]:
    with LocalCluster(
        n_workers=1,
        threads_per_worker=1,
        processes=False,
        protocol="tls",
        security=to_security(credentials),
        dashboard_address=":0",
    ) as cluster:
        yield cluster


@pytest.fixture
def file(cluster, credentials, tmp_path) -> Path:
    """The scheduler file of the cluster."""
    path = tmp_path / "cluster.json"
    scheduler_file.write(str(path), cluster.scheduler_address, credentials, job="7.r0")
    return path


def dead_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"tls://127.0.0.1:{probe.getsockname()[1]}"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


# --- connecting -----------------------------------------------------------------------------------


def test_connect_leaves_an_event_loop_free(file):
    """Regression: the loop stood still while the workers of a run came up."""

    async def connect() -> tuple[int, str]:
        task, turns = asyncio.ensure_future(hpcdask.connect(str(file), asynchronous=True)), 0
        while not task.done():
            turns += 1
            await asyncio.sleep(0.01)
        with pytest.raises(SchedulerFileError) as caught:
            task.result()
        return turns, str(caught.value)

    async def work() -> int:
        async with await hpcdask.connect(str(file), asynchronous=True) as client:
            return await client.submit(sum, [1, 2])

    assert asyncio.run(work()) == 3
    scheduler_file.note(str(file), ready=False, timeout=1.0)
    turns, said = asyncio.run(connect())
    assert turns > 10
    assert "did not come up" in said


def test_connect(file, monkeypatch):
    monkeypatch.setenv("HPCDASK_SCHEDULER_FILE", str(file))
    for path in (str(file), None):
        with hpcdask.connect(path) as client:
            assert client.submit(sum, [1, 2]).result() == 3


@pytest.mark.parametrize("own", [[], "users_preload", ["users_preload"]])
def test_a_client_sends_at_once_beside_the_user_s_preloads(file, tmp_path, monkeypatch, own):
    """distributed's own holds messages back for 10 ms, which a loop waits for each time."""
    (tmp_path / "users_preload.py").write_text("def dask_setup(client): client.mine = True")
    monkeypatch.syspath_prepend(tmp_path)
    with dask.config.set({"distributed.client.preload": own}):
        with hpcdask.connect(str(file)) as client:
            assert client.scheduler_comm.interval == 0
            assert hasattr(client, "mine") is bool(own)
        assert dask.config.get("distributed.client.preload") == own


def test_a_preload_of_ours_that_fails_is_told(file, monkeypatch, caplog):
    monkeypatch.setattr(defaults, "dask_setup", lambda client: 1 / 0)
    with hpcdask.connect(str(file)):
        assert "ZeroDivisionError" in caplog.text
    assert "preload setup: hpcdask" not in caplog.text


def test_preloads_that_have_arguments_stay_as_they_are(file, tmp_path, monkeypatch):
    (tmp_path / "users_preload.py").write_text("def dask_setup(client): client.mine = True")
    monkeypatch.syspath_prepend(tmp_path)
    own = {
        "distributed.client.preload": ["users_preload", "users_preload"],
        "distributed.client.preload-argv": [["a"], ["b"]],
    }
    with (
        dask.config.set(own),
        hpcdask.connect(str(file)) as client,
    ):
        assert client.mine


def test_plain_client_by_configuration(file, cluster, monkeypatch):
    monkeypatch.setenv("HPCDASK_SCHEDULER_FILE", str(file))
    loader = {"distributed.client.security-loader": "hpcdask.client.connect.load_security"}
    with (
        dask.config.set({"scheduler-address": cluster.scheduler_address, **loader}),
        Client() as client,
    ):
        assert client.submit(sum, [1, 2]).result() == 3


def test_the_loader_has_nothing_for_another_cluster(file, monkeypatch):
    monkeypatch.setenv("HPCDASK_SCHEDULER_FILE", str(file))
    assert load_security({"address": dead_address()}) is None
    monkeypatch.delenv("HPCDASK_SCHEDULER_FILE")
    assert load_security({"address": dead_address()}) is None


def test_the_loader_of_clusters_of_jobs_knows_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert access.load_security({"address": "tls://10.0.0.1:1234"}) is None
    folder = tmp_path / ".hpcdask" / "cluster"
    folder.mkdir(parents=True)
    (folder / "script.sh").write_text("python -m hpcdask.worker tls://10.0.0.1:1234 --name x\n")
    assert access.load_security({"address": "tls://10.0.0.1:123"}) is None
    with pytest.raises(SchedulerFileError, match="is gone: the cluster has ended"):
        access.load_security({"address": "tls://10.0.0.1:1234"})


def test_a_file_of_distributed_s_own(tmp_path):
    with LocalCluster(
        n_workers=0, processes=False, protocol="tcp", dashboard_address=":0"
    ) as plain:
        path = tmp_path / "scheduler.json"
        path.write_text(json.dumps({"type": "Scheduler", "address": plain.scheduler_address}))
        with hpcdask.connect(str(path)) as client:
            assert client.scheduler is not None


def test_no_file_named(monkeypatch):
    monkeypatch.delenv("HPCDASK_SCHEDULER_FILE", raising=False)
    with pytest.raises(SchedulerFileError, match="HPCDASK_SCHEDULER_FILE"):
        hpcdask.connect()


def test_a_missing_file_and_a_folder(tmp_path):
    path = tmp_path / "cluster.json"
    with pytest.raises(SchedulerFileError, match=rf"{path} does not exist.*--scheduler-file"):
        hpcdask.connect(str(path))
    with pytest.raises(SchedulerFileError, match=f"{tmp_path} cannot be read"):
        hpcdask.connect(str(tmp_path))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[1]",
        b"{}",
        b'{"address": 7}',
        b'{"address": "tcp://host"}',
        b'{"address": "tcp://a..b:1"}',
        b'{"address": "tcp://host:1", "hpcdask": []}',
        b"\x80\xff\x00",
    ],
)
def test_not_a_scheduler_file(tmp_path, text):
    path = tmp_path / "cluster.json"
    path.write_bytes(text)
    with pytest.raises(SchedulerFileError, match=f"{path} is not a scheduler file"):
        hpcdask.connect(str(path))


def test_cluster_that_has_ended(credentials, tmp_path):
    path, address = tmp_path / "cluster.json", dead_address()
    scheduler_file.write(str(path), address, credentials, job=None)
    started = clock()
    with pytest.raises(SchedulerFileError) as caught:
        hpcdask.connect(str(path))
    for word in (str(path), address, "has ended", socket.gethostname()):
        assert word in str(caught.value)
    assert clock() - started < 10


def test_another_s_cluster_at_that_address(cluster, tmp_path):
    """The port of a dead cluster has gone to a living one, whose keys are others."""
    path = tmp_path / "cluster.json"
    foreign = create_credentials()
    scheduler_file.write(str(path), cluster.scheduler_address, foreign, job=None)
    with pytest.raises(SchedulerFileError) as caught:
        hpcdask.connect(str(path), timeout=2)
    assert str(path) in str(caught.value)


def test_keys_that_are_gone(file):
    keys = Path(f"{file}.keys")
    (keys / "client.key.pem").unlink()
    with pytest.raises(SchedulerFileError, match=r"cluster\.json\.keys"):
        hpcdask.connect(str(file), timeout=2)
    shutil.rmtree(keys)
    with pytest.raises(SchedulerFileError, match=f"{keys} is gone"):
        hpcdask.connect(str(file))


def test_keys_open_to_others(file):
    Path(f"{file}.keys").chmod(0o755)
    with pytest.raises(SchedulerFileError, match="mode 0700"):
        hpcdask.connect(str(file))


@root_only
@pytest.mark.parametrize(
    ("suffix", "words"),
    [("", r"belongs to another user \(uid 65534\)"), (".keys", "somebody else")],
)
def test_what_belongs_to_another_user(file, suffix, words):
    os.chown(f"{file}{suffix}", 65534, 65534)
    with pytest.raises(SchedulerFileError, match=words):
        hpcdask.connect(str(file))


# --- writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_modes_and_content(credentials, tmp_path, umask):
    path = tmp_path / "cluster.json"
    before = os.umask(umask)
    try:
        scheduler_file.write(str(path), "tls://10.0.0.1:8786", credentials, job="7.r1")
    finally:
        os.umask(before)
    keys = tmp_path / "cluster.json.keys"
    assert (mode(path), mode(keys)) == (0o600, 0o700)
    assert sorted(key.name for key in keys.iterdir()) == [
        "ca.pem",
        "client.cert.pem",
        "client.key.pem",
    ]
    assert all(mode(key) == 0o600 for key in keys.iterdir())
    content = json.loads(path.read_text())
    assert content["address"] == "tls://10.0.0.1:8786"
    assert content["hpcdask"]["keys"] == str(keys)
    assert content["hpcdask"]["job"] == "7.r1"
    assert "PRIVATE KEY" not in path.read_text()


def test_without_tls_there_are_no_keys(tmp_path):
    path = tmp_path / "cluster.json"
    scheduler_file.write(str(path), "tcp://10.0.0.1:8786", {}, job=None)
    assert json.loads(path.read_text())["hpcdask"]["keys"] is None
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("file_too", [True, False])
def test_over_what_a_dead_cluster_left(credentials, tmp_path, file_too):
    path = tmp_path / "cluster.json"
    scheduler_file.write(str(path), dead_address(), create_credentials(), job="6.r0")
    if not file_too:
        path.unlink()
    scheduler_file.check_writable(str(path))
    scheduler_file.write(str(path), "tls://10.0.0.1:8786", credentials, job="7.r0")
    assert json.loads(path.read_text())["hpcdask"]["job"] == "7.r0"
    assert (Path(f"{path}.keys") / "ca.pem").read_text() == credentials["tls_ca_file"]


@root_only
def test_a_key_folder_of_another_user_is_refused_before_anything_starts(tmp_path):
    keys = tmp_path / "cluster.json.keys"
    keys.mkdir(mode=0o777)
    os.chown(keys, 65534, 65534)
    with pytest.raises(SchedulerFileError, match=str(keys)):
        scheduler_file.check_writable(str(tmp_path / "cluster.json"))


def test_a_living_cluster_s_file_is_not_ours_to_replace(file, cluster):
    with pytest.raises(SchedulerFileError, match="still answers") as caught:
        scheduler_file.check_writable(str(file))
    assert cluster.scheduler_address in str(caught.value)


def test_something_else_is_not_ours_to_replace(tmp_path):
    path = tmp_path / "thesis.tex"
    path.write_text("\\documentclass{book}")
    with pytest.raises(SchedulerFileError, match=f"{path} is not a scheduler file"):
        scheduler_file.check_writable(str(path))
    path = tmp_path / "cluster.json"
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(SchedulerFileError, match=str(path)):
        scheduler_file.check_writable(str(path))


def test_a_new_file_needs_a_folder(tmp_path):
    path = tmp_path / "nowhere" / "cluster.json"
    with pytest.raises(SchedulerFileError, match=f"--scheduler-file.*{path.parent}"):
        scheduler_file.check_writable(str(path))
    path.parent.mkdir()
    scheduler_file.check_writable(str(path))
    assert not list(path.parent.iterdir())


def test_a_folder_in_the_place_of_the_keys_is_not_removed(tmp_path):
    folder = tmp_path / "cluster.json.keys"
    folder.mkdir()
    (folder / "thesis.tex").write_text("precious")
    with pytest.raises(SchedulerFileError, match="holds something else"):
        scheduler_file.check_writable(str(tmp_path / "cluster.json"))
    with pytest.raises(FileExistsError):
        save_credentials({}, str(folder))
    assert (folder / "thesis.tex").exists()


def test_a_run_removes_the_links_of_those_that_were_killed(tmp_path, monkeypatch):
    links, there = tmp_path / "runs", tmp_path / "there"
    links.mkdir()
    there.touch()
    monkeypatch.setattr(private, "node_folder", lambda name: str(links))
    dead = str(10**8)  # no process has it
    (links / dead).symlink_to(tmp_path / "gone")
    (links / f"{dead}0").symlink_to(there)
    (links / "1").symlink_to(tmp_path / "in another mount namespace")
    agent = SimpleNamespace(scratch=str(tmp_path), parts={}, tell=lambda order: None)
    RunFiles(agent, None, "script.py").write("tcp://127.0.0.1:1", {}, {}, gpus=False)
    assert sorted(os.listdir(links)) == sorted(["1", f"{dead}0", str(os.getpid())])
