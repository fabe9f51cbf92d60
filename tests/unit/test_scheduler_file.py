"""The scheduler file: who may write, read and trust it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import dask
import pytest
from distributed import Client, LocalCluster

import hpcdask
from hpcdask.client import scheduler_file
from hpcdask.errors import SchedulerFileError
from hpcdask.jobs import access
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.security.credentials import (
    Credentials,
    client_only,
    create_credentials,
    load_credentials,
    save_credentials,
    to_security,
)


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


async def test_connect_leaves_an_event_loop_free(file):
    """Regression: the loop stood still while the workers of a run came up."""
    async with await hpcdask.connect(str(file), asynchronous=True) as client:
        assert await client.submit(sum, [1, 2]) == 3
    scheduler_file.note(str(file), ready=False, timeout=1.0)
    task, turns = asyncio.ensure_future(hpcdask.connect(str(file), asynchronous=True)), 0
    while not task.done():
        turns += 1
        await asyncio.sleep(0.01)
    assert turns > 10
    with pytest.raises(SchedulerFileError, match="did not come up"):
        task.result()


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


def test_plain_client_by_configuration(file, cluster, monkeypatch):
    monkeypatch.setenv("HPCDASK_SCHEDULER_FILE", str(file))
    loader = {"distributed.client.security-loader": "hpcdask.client.connect.load_security"}
    with (
        dask.config.set({"scheduler-address": cluster.scheduler_address, **loader}),
        Client() as client,
    ):
        assert client.submit(sum, [1, 2]).result() == 3


def test_the_loader_of_clusters_of_jobs_knows_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert access.load_security({"address": "tls://10.0.0.1:1234"}) is None
    made = [ClusterFolder.create(name, "slurm") for name in ("old-1", "new-2", "other-3")]
    for folder, port in zip(made, (1234, 1234, 123), strict=True):
        folder.write_script(f"python -m hpcdask.worker tls://10.0.0.1:{port} --name x\n")
    save_credentials(create_credentials(), str(made[1].keys))
    made[0].mark_ended()  # it had the same fixed port
    found = access.load_security({"address": "tls://10.0.0.1:1234"})
    assert found.get_connection_args("client")["require_encryption"]
    assert access.load_security({"address": "tls://10.0.0.1:12"}) is None
    made[1].mark_ended()
    assert access.load_security({"address": "tls://10.0.0.1:1234"}) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist.*--scheduler-file"),
        (b"", "is not a scheduler file"),
        (b'{"address": "tcp://host"}', "is not a scheduler file"),
        (b'{"address": "tcp://host:1", "hpcdask": []}', "is not a scheduler file"),
        (b"\x80\xff\x00", "is not a scheduler file"),
    ],
)
def test_not_a_scheduler_file(tmp_path, text, message):
    path = tmp_path / "cluster.json"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(SchedulerFileError, match=f"{path} {message}"):
        hpcdask.connect(str(path))


def test_cluster_that_has_ended(credentials, tmp_path):
    path, address = tmp_path / "cluster.json", dead_address()
    scheduler_file.write(str(path), address, credentials, job=None)
    with pytest.raises(SchedulerFileError) as caught:
        hpcdask.connect(str(path))
    for word in (str(path), address, "has ended", socket.gethostname()):
        assert word in str(caught.value)


def test_another_s_cluster_at_that_address(cluster, tmp_path):
    """The port of a dead cluster has gone to a living one, whose keys are others."""
    path = str(tmp_path / "cluster.json")
    scheduler_file.write(path, cluster.scheduler_address, create_credentials(), job=None)
    with pytest.raises(SchedulerFileError, match=path):
        hpcdask.connect(path, timeout=2)


def test_keys_that_are_open_to_others_or_gone(file):
    keys = Path(f"{file}.keys")
    keys.chmod(0o644)
    with pytest.raises(SchedulerFileError, match="mode 0600"):
        hpcdask.connect(str(file))
    keys.unlink()
    with pytest.raises(SchedulerFileError, match=f"{keys} is gone"):
        hpcdask.connect(str(file))


# --- writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_modes_and_content(credentials, tmp_path, umask):
    path, keys = tmp_path / "cluster.json", tmp_path / "cluster.json.keys"
    before = os.umask(umask)
    try:
        scheduler_file.write(str(path), "tls://10.0.0.1:8786", credentials, job="7.r1")
    finally:
        os.umask(before)
    assert (mode(path), mode(keys)) == (0o600, 0o600)
    assert load_credentials(str(keys)) == client_only(credentials)
    content = json.loads(path.read_text())
    assert content["address"] == "tls://10.0.0.1:8786"
    assert content["hpcdask"].items() >= {"keys": str(keys), "job": "7.r1"}.items()
    assert "PRIVATE KEY" not in path.read_text()


@pytest.mark.parametrize("file_too", [True, False])
def test_over_what_a_dead_cluster_left(credentials, tmp_path, file_too):
    path = tmp_path / "cluster.json"
    scheduler_file.write(str(path), dead_address(), create_credentials(), job="6.r0")
    if not file_too:
        path.unlink()
    scheduler_file.check_writable(str(path))
    scheduler_file.write(str(path), "tls://10.0.0.1:8786", credentials, job="7.r0")
    assert json.loads(path.read_text())["hpcdask"]["job"] == "7.r0"
    assert load_credentials(f"{path}.keys") == client_only(credentials)


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
