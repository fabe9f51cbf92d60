"""The watchdog: what is left of a cluster whose notebook is gone."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from fake_notebook import Notebook
from hpcdask.errors import NotHere, QueueError
from hpcdask.jobs import cancel, watchdog
from hpcdask.jobs.folder import ClusterFolder
from hpcdask.queues.registry import SYSTEMS
from hpcdask.queues.sge import SgeQueue
from launching import wait_for


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    started: list[Notebook] = []

    def start(*options: str, **kwargs) -> Notebook:
        started.append(Notebook(tmp_path, *options, **kwargs))
        return started[-1]

    yield start
    for notebook in started:
        notebook.close()


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def by_signal(number: int):
    return lambda notebook: os.killpg(notebook.process.pid, number)


def kill_after_signals(notebook: Notebook) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        notebook.watchdog.send_signal(number)
    notebook.kill()


@pytest.mark.parametrize(
    ("options", "finish"),
    [
        pytest.param([], by_signal(signal.SIGKILL), id="SIGKILL"),
        pytest.param([], by_signal(signal.SIGHUP), id="SIGHUP"),
        pytest.param([], lambda notebook: notebook.tell("exit"), id="exit"),
        pytest.param([], kill_after_signals, id="signals to the watchdog"),
        pytest.param(["--forked"], Notebook.kill, id="a fork that holds the pipe"),
        pytest.param(["--unrecorded"], Notebook.kill, id="jobs known by their tag only"),
    ],
)
def test_however_the_notebook_ends_its_jobs_do_too(start, options, finish):
    notebook = start(*options)
    assert len({process.pid for process in notebook.jobs()}) >= 3
    assert notebook.folder.lives() is True
    assert bool(notebook.folder.submitted()) == ("--unrecorded" not in options)
    finish(notebook)
    wait_for(lambda: not notebook.jobs(), 60, "the jobs' end")
    wait_for(lambda: not alive(notebook.watchdog), 60, "the watchdog's end")
    assert not notebook.folder.keys.exists()
    assert ClusterFolder.open(notebook.folder.path).ended is not None
    log = notebook.folder.path / "watchdog.log"
    assert log.stat().st_mode & 0o777 == 0o600
    text = log.read_text()
    assert "the notebook is gone" in text
    assert all(job_id in text for job_id in notebook.folder.submitted())
    assert text.endswith("no job is left\n")
    assert "Traceback" not in text


def test_jobs_end_though_their_folder_is_gone(start):
    notebook = start()
    shutil.rmtree(notebook.folder.path)
    notebook.kill()
    wait_for(lambda: not notebook.jobs(), 60, "the jobs' end")
    wait_for(lambda: not alive(notebook.watchdog), 60, "the watchdog's end")
    assert not notebook.folder.path.exists()


def test_a_dismissed_watchdog_does_nothing(start):
    notebook = start()
    notebook.tell("dismiss")
    assert not alive(notebook.watchdog)
    assert notebook.process.returncode == 0
    assert len(notebook.jobs()) >= 3
    assert (notebook.folder.path / "watchdog.log").read_text() == ""
    assert notebook.folder.keys.exists()  # its cluster removes them


def test_the_watchdog_loads_no_dask():
    program = f"""
import sys
from hpcdask.jobs import cancel, watchdog
from hpcdask.queues import registry
for name in {[*SYSTEMS]}:
    registry.queue_class(name)()
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    loaded = {module.partition(".")[0] for module in done.stdout.split()}
    assert "hpcdask" in loaded, done.stderr
    large = {"dask", "dask_jobqueue", "distributed", "tornado", "click", "numpy", "yaml"}
    assert not loaded & large


def test_a_watchdog_that_does_not_start_is_an_error(tmp_path):
    folder = ClusterFolder.create("ab-1", "local", tmp_path)
    (folder.path / "cluster.json").unlink()
    before = set(psutil.Process().children())  # multiprocessing's resource tracker may live
    with pytest.raises(QueueError, match=r"watchdog, .* has failed, .*See .*watchdog\.log"):
        watchdog.start_watchdog(folder)
    assert "is not the folder of a cluster" in (folder.path / "watchdog.log").read_text()
    assert not [child for child in set(psutil.Process().children()) - before if alive(child)]


class Jobs:
    """Jobs of a queue that shows these in turn, by id with their tags; an exception: no answer."""

    def __init__(self, *looks: dict[str, str] | Exception) -> None:
        self.looks = list(looks)
        self.cancelled: list[list[str]] = []

    async def tagged(self) -> dict[str, str]:
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        if isinstance(look, Exception):
            raise look
        return look

    async def cancel(self, ids: list[str]) -> None:
        self.cancelled.append(list(ids))


def ours(*ids: str) -> dict[str, str]:
    return dict.fromkeys(ids, "hpcdask:ab-1")


@pytest.fixture
def end_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """End the jobs of a cluster, and return what is said."""
    monkeypatch.setattr(cancel, "PAUSE_S", (0.001, 0.01))
    folder = ClusterFolder.create("ab-1", "local", tmp_path)
    folder.write_script("")
    folder.record(["7", "8", "10"])

    def end_all(queue: Jobs, cut_off: bool = False) -> list[str]:
        said: list[str] = []
        if cut_off:
            folder.begin_submission()
            monkeypatch.setattr(cancel, "UNANSWERED_S", 0.5)
        asyncio.run(cancel.end_jobs(queue, folder.name, said.append, folder=folder))
        return said

    return end_all


def test_a_queue_is_asked_again_after_no_answer_or_one_that_makes_no_sense(end_all):
    silent, odd = QueueError("squeue hangs"), KeyError("State")
    jobs = Jobs(silent, ours("1", "2"), odd, silent, ours("2"), {})
    silent_once, first, odd_once, second = end_all(jobs)
    assert (silent_once, odd_once) == (
        "squeue hangs; trying again",
        "KeyError: 'State'; trying again",
    )
    assert (first, second) == ("cancelling 1 2", "cancelling 2")
    assert jobs.cancelled == [["1", "2"], ["2"]]


def test_a_host_that_may_not_ask_gives_up_at_once(end_all, monkeypatch):
    """A watchdog on a compute node would outlive its job; there others end what is left."""
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NotHere, match="qstat cannot be started"):
        end_all(SgeQueue())


def test_jobs_that_do_not_end_are_named(end_all, monkeypatch):
    monkeypatch.setattr(cancel, "END_S", 0.1)
    with pytest.raises(QueueError, match="these jobs do not end: 1 2"):
        end_all(Jobs(ours("1", "2")))


def test_a_submission_that_was_cut_off_is_waited_for(end_all):
    jobs = Jobs({}, {}, ours("7"), {})
    waits = "waiting for the jobs of a submission that was cut off"
    assert end_all(jobs, cut_off=True) == [waits, "cancelling 7"]
    assert jobs.cancelled == [["7"]]


def test_only_jobs_with_the_clusters_tag_are_cancelled(end_all):
    """Regression: recorded ids were cancelled unseen, and queues use their numbers again."""
    others = {"8": "hpcdask:cd-2"}
    jobs = Jobs({**ours("7"), **others, "9": "hpcdask:ab-1.gpu"}, others)
    end_all(jobs)
    assert jobs.cancelled == [["7", "9"]]


def test_a_watchdog_that_hangs_keeps_no_cluster_from_its_end(tmp_path, monkeypatch):
    """Regression: `close` waited for it for ever."""
    folder = ClusterFolder.create("mine-1", "local", base=tmp_path)
    process = watchdog.start_watchdog(folder)
    process.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(watchdog, "DISMISS_S", 0.1)
    watchdog.dismiss(process)
    assert process.returncode == -signal.SIGKILL
