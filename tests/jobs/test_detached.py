"""Detached clusters with processes of this machine as jobs: who attaches, and every end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from distributed import Client

import hpcdask
from hpcdask.clusters.detached import attached
from hpcdask.errors import ClusterError, UsageError
from hpcdask.jobs import detached
from hpcdask.jobs.detached import ControlRecord
from hpcdask.jobs.folder import ClusterFolder
from launching import leftovers, run_cli, until, wait_for, walk

pytestmark = pytest.mark.slow

ONE = {"device": "cpu", "cores": 1, "processes": 1, "memory": "512MiB", "poll_interval": 0.3}
PROGRAM = Path(__file__).with_name("attached.py")


def make(folder: Path, **keywords):
    usual = {"name": "mine", "detached": True, "shared_temp_directory": str(folder)}
    return hpcdask.LocalCUDAJobCluster(**{**ONE, **usual, **keywords})


def hpcdask_cli(*words: str, code: int = 0) -> str:
    done = run_cli(*words, code=code)
    return done.stdout + done.stderr


def test_a_killed_notebook_loses_nothing_and_runs_nothing_twice(folder: Path, tmp_path: Path):
    ran = tmp_path / "ran"
    ran.mkdir()
    with make(folder, n_workers=2):
        pass  # the notebook that made it goes
    command = [sys.executable, PROGRAM, "mine", ran, "200"]
    notebook = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert notebook.stdout.readline() == "computes\n"
    wait_for(lambda: len(list(ran.iterdir())) > 20, 60, "some to be done")
    notebook.kill()
    notebook.communicate()
    assert len(list(ran.iterdir())) < 200
    with hpcdask.attach("mine") as cluster, cluster.get_client() as client:
        results = client.gather(client.get_dataset("work"))
        assert results == [number * number for number in range(200)]
        assert {path.read_text() for path in ran.iterdir()} == {"x"}
        del results
        client.unpublish_dataset("work")
        cluster.shutdown()


@pytest.mark.long
def test_groups_by_the_command_line(folder: Path, tmp_path: Path):
    """The logs of jobs go where the user wants them, and one group that fails is not all."""
    logs = tmp_path / "logs"
    groups = {"one": {}, "two": {}, "bad": {"python": "/no/such/python"}}
    with make(folder, groups=groups, log_directory=str(logs)) as cluster:
        shown = hpcdask_cli("scale", "mine", "one=1", "two=1")
        assert "1 one" in shown
        assert "1 two" in shown
        cluster.wait_for_workers(2, timeout=180)
        script = tmp_path / "counts.py"
        script.write_text("from distributed import Client; print(len(Client().nthreads()))")
        assert hpcdask_cli("attach", "mine", "--", str(script)).splitlines()[0] == "2"
        refused = hpcdask_cli("scale", "mine", "one=x", code=2)
        assert "or GROUP=NUMBER for each group" in refused
        cluster.scale(bad=1)
        wait_for(lambda: cluster.failure is not None, 120, "the bad group to fail")
        cluster.wait_for_workers(2, timeout=60)
        assert list(logs.iterdir())
        cluster.shutdown()


def test_two_notebooks_see_the_same(folder: Path, capfd: pytest.CaptureFixture[str]):
    with make(folder) as one, hpcdask.attach("mine") as other:
        other.scale(2)
        wait_for(lambda: len(one.plan) == 2, 30, "one to see it")
        one.wait_for_workers(2, timeout=180)
        wait_for(lambda: len(other.scheduler_info["workers"]) == 2, 30, "the other to see them")
        assert "control process " in hpcdask_cli("list", "--jobs")
        assert one.job_script() == other.job_script()
        assert list(other.job_logs()) == [job.id for job in one.jobs()]
        one.adapt(minimum=0, maximum=1, interval="200ms").stop()
        one.adapt(minimum=0, maximum=0, interval="200ms")
        wait_for(lambda: not other.plan, 60, "the other to see it")
        assert hpcdask_cli("scale", "mine", "1").startswith("mine: adaptive scaling is off\n")
        assert "adaptive" not in hpcdask_cli("scale", "mine", "1")
        one.wait_for_workers(1, timeout=180)
        assert "mine" in repr(one)
        assert "Jobs:" in other._repr_html_()
        with pytest.raises(UsageError, match="maximum"):
            one.adapt(minimum=2, maximum=1)
        (row,) = json.loads(run_cli("list", "--json").stdout)
        assert (row["name"], row["kind"], row["state"]) == ("mine", "detached", "running")
        stacks = hpcdask_cli("stacks", "mine")
        assert one.id in stacks
        assert "\nControl process (process " in stacks
        assert "otebook" not in stacks
        assert "1 worker on " in hpcdask_cli("logs", "mine")
        capfd.readouterr()
        hpcdask_cli("down", "mine")
        # sooner than Dask gives up connecting
        wait_for(lambda: other.failure is not None, 20, "the other to see its end")
        assert "has ended: hpcdask down" in capfd.readouterr().err
        with pytest.raises(ClusterError, match="hpcdask down"):
            one.scale(1)
    assert "hpcdask down" in hpcdask_cli("list")
    assert "1 worker on " in hpcdask_cli("logs", "mine")


def test_scale_in_an_event_loop_works_without_await(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """Regression: it did nothing; and a look that failed was the notebook's last."""
    real, failures = attached.ask, ["an answer that makes no sense"]

    async def ask(scheduler, name, *args, **keywords):
        if name == "status" and failures:
            raise ValueError(failures.pop())
        return await real(scheduler, name, *args, **keywords)

    async def use() -> None:
        async with hpcdask.attach("mine", asynchronous=True) as cluster:
            monkeypatch.setattr(attached, "ask", ask)
            await until(lambda: not failures, 30, "a look to fail")
            cluster.scale(2)
            await until(lambda: len(cluster.plan) == 2, 30, "the wish to be seen")
            cluster.scale(gpu=1)
            await until(lambda: "no group gpu" in told(), 30, "the refusal")

    said = [""]

    def told() -> str:
        said[0] += capfd.readouterr().err
        return said[0]

    with make(folder) as cluster:
        hint = hpcdask_cli("attach", "mine", "--", os.devnull)
        assert "mine has no workers and wants none" in hint
        asyncio.run(use())
        assert told().count("cannot be followed: ValueError: an answer that makes no sense") == 1
        assert "mine: 1 worker wanted; jobs: 1 " in hpcdask_cli("scale", "mine", "1")
        assert "wants none" not in hpcdask_cli("attach", "mine", "--", os.devnull)
        cluster.shutdown()


def test_many_come_and_go(folder: Path):
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    with make(folder) as cluster:
        hpcdask.attach("mine").close()
        before, files = held(), sorted(walk(folder))
        for _ in range(20):
            with hpcdask.attach("mine") as other, other.get_client():
                pass
        wait_for(lambda: held() <= before, 30, "nothing more to be held")
        assert sorted(walk(folder)) == files
        cluster.shutdown()


def test_nobody_uses_it(folder: Path):
    cluster = make(folder, idle_timeout="2s", n_workers=1)
    found = detached.find("mine")
    cluster.close()
    wait_for(lambda: ClusterFolder.open(found.path).ended, 60, "its end")
    with pytest.raises(ClusterError, match="nobody used it for 2 s"):
        hpcdask.attach("mine")


def shut_down(cluster) -> None:
    with Client(cluster.scheduler_address, security=cluster.security) as client:
        client.shutdown()


def send(number: int):
    return lambda cluster: os.kill(detached.find("mine").owner.pid, number)


@pytest.mark.parametrize(
    ("end", "why"),
    [
        pytest.param(shut_down, "Client.shutdown", id="a client shuts it down"),
        pytest.param(send(signal.SIGTERM), "SIGTERM", id="SIGTERM", marks=pytest.mark.long),
        pytest.param(send(signal.SIGKILL), "SIGKILL", id="SIGKILL", marks=pytest.mark.long),
    ],
)
def test_its_end_is_told_while_it_computes(folder: Path, end, why: str):
    with make(folder, n_workers=1) as cluster, cluster.get_client() as client:
        client.wait_for_workers(1, timeout=180)
        future = client.submit(lambda: __import__("time").sleep(1000))
        wait_for(lambda: any(client.processing().values()), 60, "a worker to have it")
        end(cluster)
        if why == "SIGTERM":
            with pytest.raises(ClusterError, match="has ended: SIGTERM"):
                future.result(timeout=120)
        wait_for(lambda: cluster.failure is not None, 90, "the notebook to see it")
        assert why in str(cluster.failure)
    wait_for(lambda: detached.find("mine").ended, 60, "its end")
    assert not leftovers(detached.find("mine").tag)
    assert why in hpcdask_cli("list")


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"name": None}, "a name is missing"),
        ({"core": 1}, "unknown keyword core"),
        ({"scheduler_options": {"x": lambda: 1}}, "cannot be sent"),
        ({"scheduler_job": {"cores": 1}}, "scheduler_job"),
        ({"detached": False, "idle_timeout": 3}, "is for clusters with detached=True"),
    ],
)
def test_keywords_that_are_refused(folder: Path, keywords: dict, message: str):
    with pytest.raises(UsageError, match=message):
        make(folder, **keywords)


def test_a_name_is_taken_once_and_known_to_its_user_alone(folder: Path):
    with pytest.raises(UsageError, match=r"no detached cluster mine\. There is none"):
        hpcdask.attach("mine")
    with make(folder) as cluster:
        with pytest.raises(UsageError, match="mine already"):
            make(folder)
        found = detached.find("mine")
        assert ControlRecord.read(found).name == "mine"
        assert {path.stat().st_mode & 0o077 for path in walk(found.path)} == {0}
        found.path.chmod(0o755)  # as of another user: nobody attaches through it
        with pytest.raises(UsageError, match="no detached cluster"):
            hpcdask.attach("mine")
        found.path.chmod(0o700)
        cluster.shutdown()
