"""The note that tells the ranks where rank 0 is: private, whole, and of this launch."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import stat
import tempfile
from pathlib import Path

import dask
import pytest

from hpcdask.bootstrap.ranks import Rank
from hpcdask.errors import LaunchError
from hpcdask.runner import link
from hpcdask.runner.link import Rendezvous, RendezvousInfo
from hpcdask.security.credentials import create_credentials
from strangers import UID, root_only

INFO = RendezvousInfo("10.0.0.1", 4711, "n1", {})


@pytest.fixture
def base(tmp_path, monkeypatch) -> Path:
    """The temporary folder of this test; the home folder lies beside it."""
    home, base = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    base.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    return base


def meeting_of(launch: str, nodes: int = 1) -> Rendezvous:
    """The meeting of a launch with a rank on each node."""
    return Rendezvous(Rank(0, nodes, 0, 1, "n1", "srun", launch))


def mode(path: str) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def test_what_rank_0_publishes_the_others_fetch(base):
    one = meeting_of("launch")
    other = meeting_of("launch")
    assert other.fetch() is None
    one.publish(INFO)
    assert other.fetch() == INFO
    one.close()
    assert other.fetch() is None
    assert not list(base.iterdir())
    one.close()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_else_may_read_it(base, umask):
    meeting = meeting_of("launch")
    before = os.umask(umask)
    try:
        meeting.publish(INFO)
    finally:
        os.umask(before)
    folder = meeting.folder
    assert (mode(folder), mode(f"{folder}/note.json")) == (0o700, 0o600)
    assert os.listdir(folder) == ["note.json"]


def test_launches_do_not_meet(base):
    one, other = (meeting_of(name) for name in ("job 7.r0", "job 7.r1"))
    one.publish(INFO)
    assert one.folder != other.folder
    assert other.fetch() is None


@pytest.mark.parametrize(
    "text", [json.dumps(INFO.to_json())[:-9], "", "[" * 500_000], ids=["cut off", "empty", "deep"]
)
def test_what_is_not_this_launch_s_note_is_ignored_and_replaced(base, text):
    meeting = meeting_of("job 7.r1")
    os.mkdir(meeting.folder, 0o700)
    Path(meeting.folder, "note.json").write_text(text)
    assert meeting.fetch() is None
    meeting.publish(INFO)
    assert meeting.fetch() == INFO


def put_stranger(folder: str) -> None:
    os.mkdir(folder)
    os.chown(folder, UID, UID)


@pytest.mark.parametrize(
    "put", [lambda folder: Path(folder).touch(), pytest.param(put_stranger, marks=root_only)]
)
def test_where_the_folder_s_name_is_taken_the_error_says_what_to_set(base, put):
    meeting = meeting_of("launch")
    put(meeting.folder)
    assert meeting.fetch() is None
    with pytest.raises(LaunchError, match=rf"{meeting.folder}.*TMPDIR"):
        meeting.publish(INFO)


@root_only
def test_a_note_of_another_user_is_not_read(base):
    meeting = meeting_of("launch")
    meeting.publish(INFO)
    os.chown(f"{meeting.folder}/note.json", UID, UID)
    assert meeting.fetch() is None


def test_ranks_of_several_nodes_meet_in_the_home_folder_or_the_configured_one(base):
    home = base.parent / "home"
    meeting = meeting_of("launch", nodes=2)
    meeting.publish(INFO)
    assert Path(meeting.folder).parent == home
    meeting.close()
    assert not list(home.iterdir())
    with dask.config.set({"hpcdask.shared-directory": str(base / "scratch")}):
        assert Path(meeting_of("launch", nodes=2).folder).parent == base / "scratch"
        assert Path(meeting_of("launch").folder).parent == base


async def test_only_who_has_the_keys_arrives(base):
    reports = []

    async def arrived(report, channel):
        reports.append(report)
        channel.close()

    meeting = meeting_of("launch")
    await meeting.open(arrived, create_credentials(), "127.0.0.1")
    note = meeting.fetch()
    rank = await link.dial(note, "127.0.0.1")
    for credentials in (create_credentials(), {}):
        with contextlib.suppress(OSError):
            stranger = dataclasses.replace(note, credentials=credentials)
            channel = await link.dial(stranger, "127.0.0.1")
            channel.send(rank=2)
            assert await channel.receive() is None
    rank.send(rank=1)
    assert await rank.receive() is None  # `arrived` closed the line
    meeting.close()
    with pytest.raises(ConnectionRefusedError):
        await link.dial(note, "127.0.0.1")
    assert reports == [{"rank": 1}]


async def test_a_rank_says_why_rank_0_does_not_answer(base):
    """A port where nobody listens is another matter than a network that swallows all."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        info = RendezvousInfo("127.0.0.1", unused.getsockname()[1], "n1", {})
        meeting_of("test", nodes=2).publish(info)
        rank = Rank(1, 2, 0, 1, "n2", "srun", "test")
        with pytest.raises(LaunchError, match=r"on n1 within 0\.2 s \(.*refused.*\): the note"):
            await link.find_leader(rank, 0.2)
