"""The note that tells the ranks where rank 0 is: private, whole, and of this launch."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import json
import os
import socket
import stat
import tempfile
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import dask
import pytest

from hpcdask.bootstrap import orders
from hpcdask.bootstrap.ranks import Rank
from hpcdask.errors import LaunchError
from hpcdask.gpu.devices import Gpu
from hpcdask.node.placement import WorkerPlacement
from hpcdask.runner import follower, link, protocol
from hpcdask.runner.rendezvous import Rendezvous, RendezvousInfo
from hpcdask.security import private
from strangers import UID, root_only

INFO = RendezvousInfo("10.0.0.1", 4711, "n1", "x", {})
NOTE = INFO.to_json()


@pytest.fixture
def base(tmp_path, monkeypatch) -> Path:
    """The temporary folder of this test; the home folder lies beside it."""
    home, base = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    base.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    return base


def test_a_rendezvous_s_info_survives_json():
    info = dataclasses.replace(INFO, credentials={"tls_ca_file": "PEM"}, others=["10.0.0.2"])
    assert RendezvousInfo.from_json(json.loads(json.dumps(info.to_json()))) == info


MESSAGES = [
    protocol.StartWorkers(
        "tls://n1:1", [WorkerPlacement("n1-0", Gpu("GPU-a", "H200", 1, (0,)), (0, 1), 1, 0)]
    ),
    orders.StartProgram({"DASK_SCHEDULER_ADDRESS": "tls://n1:1"}),
    orders.ProgramStarted(7),
    orders.ProgramEnded(0),
    orders.SignalProgram(10),
    orders.AbortLaunch(),
    orders.Clean("/tmp/x", "later"),
    orders.Signal(15),
    protocol.EndRun(2, 10.0),
    protocol.WorkerFailed(1, None, "no room"),
    protocol.StartScheduler(None, "ib0", "tls", {"tls_ca_file": "PEM"}, ":8787", "/tmp/x", None),
    protocol.Silence(),
    protocol.CloseScheduler(),
    protocol.SchedulerStarted("tls://n1:1", "127.0.0.1", 8787),
    protocol.SchedulerFailed("no port"),
    protocol.WorkersChanged({"n1-0": "tls://10.0.0.1:4000"}, ["n1-1"]),
    protocol.WorkerWarm({"name": "n1-0", "links": []}),
    protocol.SchedulerClosed(),
    protocol.TellGpuUsage(),
    protocol.GpuUsageTold(["GPUs: 8 x H200"]),
]


def test_all_messages_survive_json():
    assert {type(message) for message in MESSAGES} == set(orders.Message.__subclasses__())
    for message in MESSAGES:
        assert orders.read(json.loads(json.dumps(message.to_json()))) == message


def mode(path: str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_what_rank_0_publishes_the_others_fetch(base):
    one = Rendezvous("launch", shared=False)
    other = Rendezvous("launch", shared=False)
    assert other.fetch() is None
    one.publish(INFO)
    assert other.fetch() == INFO
    one.close()
    assert other.fetch() is None
    assert not list(base.iterdir())
    one.close()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_may_read_it(base, umask):
    meeting = Rendezvous("launch", shared=False)
    before = os.umask(umask)
    try:
        meeting.publish(INFO)
    finally:
        os.umask(before)
    folder = meeting.folder
    assert (mode(folder), mode(f"{folder}/note.json")) == (0o700, 0o600)
    assert os.listdir(folder) == ["note.json"]


def test_a_folder_that_was_left_open_is_closed(base):
    meeting = Rendezvous("launch", shared=False)
    os.mkdir(meeting.folder)
    os.chmod(meeting.folder, 0o777)
    meeting.publish(INFO)
    assert mode(meeting.folder) == 0o700


def test_launches_do_not_meet(base):
    one, other = (Rendezvous(name, shared=False) for name in ("job 7.r0", "job 7.r1"))
    one.publish(INFO)
    assert one.folder != other.folder
    assert other.fetch() is None


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({**NOTE, "launch": "job 7.r0"}),
        json.dumps(NOTE),
        json.dumps({**NOTE, "launch": "job 7.r1"})[:-9],
        "",
        "[" * 500_000,
    ],
    ids=["another life", "no launch", "cut off", "empty", "deep"],
)
def test_what_is_not_this_launch_s_note_is_ignored_and_replaced(base, text):
    meeting = Rendezvous("job 7.r1", shared=False)
    os.mkdir(meeting.folder, 0o700)
    Path(meeting.folder, "note.json").write_text(text)
    assert meeting.fetch() is None
    meeting.publish(INFO)
    assert meeting.fetch() == INFO
    assert json.loads(Path(meeting.folder, "note.json").read_text())["launch"] == "job 7.r1"


def put_stranger(folder: str) -> None:
    os.mkdir(folder)
    os.chown(folder, UID, UID)


@pytest.mark.parametrize(
    "put", [lambda folder: Path(folder).touch(), pytest.param(put_stranger, marks=root_only)]
)
def test_where_the_folder_s_name_is_taken_the_error_says_what_to_set(base, put):
    meeting = Rendezvous("launch", shared=False)
    put(meeting.folder)
    assert meeting.fetch() is None
    with pytest.raises(LaunchError, match=rf"{meeting.folder}.*TMPDIR"):
        meeting.publish(INFO)


@root_only
def test_a_note_of_another_user_is_not_read(base):
    meeting = Rendezvous("launch", shared=False)
    meeting.publish(INFO)
    os.chown(f"{meeting.folder}/note.json", UID, UID)
    assert meeting.fetch() is None


def test_a_note_is_seen_whole_or_not_at_all(base):
    """Rank 0 writes over the note of an earlier life while the others already read."""

    def numbered(n: int) -> RendezvousInfo:
        return dataclasses.replace(INFO, credentials={"n": n, "key": "k" * 20_000})

    meeting = Rendezvous("launch", shared=False)
    meeting.publish(numbered(0))
    over = threading.Event()

    def write() -> None:
        for n in range(1, 60):
            meeting.publish(numbered(n))
        over.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen = []
    while not over.is_set():
        info = meeting.fetch()
        assert info is not None
        assert len(info.credentials["key"]) == 20_000
        seen.append(info.credentials["n"])
    writer.join()
    assert seen == sorted(seen)


def test_a_stale_handle_of_nfs_means_look_again(base, monkeypatch):
    meeting = Rendezvous("launch", shared=False)
    meeting.publish(INFO)

    def stale(path, *args, **kwargs):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)

    with monkeypatch.context() as patch:
        patch.setattr(private, "read", stale)
        assert meeting.fetch() is None
    assert meeting.fetch() is not None


def test_ranks_of_several_nodes_meet_in_the_home_folder(base):
    home = base.parent / "home"
    meeting = Rendezvous("launch", shared=True)
    meeting.publish(INFO)
    assert Path(meeting.folder).parent == home
    meeting.close()
    assert not list(home.iterdir())


def test_or_in_the_folder_of_the_configuration(base):
    scratch = base / "scratch"
    with dask.config.set({"hpcdask.shared-directory": str(scratch)}):
        assert Path(Rendezvous("launch", shared=True).folder).parent == scratch
        assert Path(Rendezvous("launch", shared=False).folder).parent == base


def test_a_shared_folder_that_does_not_exist_is_named(base):
    missing = base / "nowhere"
    with dask.config.set({"hpcdask.shared-directory": str(missing)}):
        meeting = Rendezvous("launch", shared=True)
    with pytest.raises(LaunchError, match=str(missing)):
        meeting.publish(INFO)


def test_only_who_knows_the_nonce_arrives():
    async def meet() -> list[dict]:
        reports = []

        async def arrived(report, channel):
            reports.append(report)
            channel.close()

        hub = link.Listener("secret", arrived)
        port = await hub.listen("127.0.0.1", None)
        rank = await link.connect_to_leader("127.0.0.1", port, None, "secret")
        stranger = await link.connect_to_leader("127.0.0.1", port, None, "guess")
        stranger.send(rank=2)
        assert await stranger.receive() is None
        rank.send(rank=1)
        assert await rank.receive() is None  # `arrived` closed the line
        hub.close()
        with pytest.raises(ConnectionRefusedError):
            await link.connect_to_leader("127.0.0.1", port, None, "secret")
        return reports

    assert asyncio.run(meet()) == [{"rank": 1}]


def test_a_note_without_keys_is_refused_where_tls_is_asked_for():
    meeting = SimpleNamespace(fetch=lambda: INFO)
    with pytest.raises(LaunchError, match="has no keys, though --no-tls is not among"):
        asyncio.run(link.find_leader(None, meeting, 5, None))


def test_a_rank_says_why_rank_0_does_not_answer():
    """A port where nobody listens is another matter than a network that swallows all."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        info = RendezvousInfo("127.0.0.1", unused.getsockname()[1], "n1", "nonce", {})
        note = SimpleNamespace(fetch=lambda: info)
        rank = Rank(1, 2, 0, 1, "n2", "srun", "test")
        why = partial(follower.unreachable, 0.2)
        with pytest.raises(LaunchError, match=r"on n1 within 0\.2 s \(.*refused.*\): the note"):
            asyncio.run(link.find_leader(rank, note, 0.2, why, tls=False))
