"""SLURM's door on a real SLURM."""

from __future__ import annotations

import asyncio
import os
import stat
import time
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
from dask_jobqueue.slurm import SLURMJob

from clock import clock
from doors import TAG
from hpcdask.errors import Refused
from hpcdask.queues.base import Request
from hpcdask.queues.job_state import OVER, JobState, QueueStatus
from hpcdask.queues.slurm import SlurmQueue
from launching import wait_for
from login import Command
from slurm_site import SlurmSite

pytestmark = pytest.mark.slurm
SLEEP = "exec sleep 1000"


class Door:
    """A door to a site's SLURM, called without an event loop."""

    def __init__(self, site: SlurmSite, folder: Path, **options) -> None:
        self.site = site
        self.queue = SlurmQueue(**options)
        self.folder = folder
        self.path = folder / "script.sh"

    def write(self, command: str, *, logs: str = "logs", request=None, **keywords) -> str:
        """Write a job's script, and return its path."""
        place = self.folder / logs
        place.mkdir(exist_ok=True)
        job = SLURMJob(
            name="x", **{"cores": 1, "memory": "100MB", "job_name": "placeholder", **keywords}
        )
        asked = Request(**{"name": "train", "tag": TAG, "folder": str(place), **(request or {})})
        preamble = [f"export ID={self.queue.job_id} RESTARTS={self.queue.restarts}"]
        self.path.write_text(self.queue.script(job, asked, preamble, command))
        return str(self.path)

    def submit(self, command: str = SLEEP, count: int = 1, **keywords) -> list[str]:
        return asyncio.run(self.queue.submit(self.write(command, **keywords), count))

    def query(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        return asyncio.run(self.queue.query(ids))

    def departed(self, ids: Collection[str]) -> dict[str, QueueStatus]:
        return asyncio.run(self.queue.departed(ids))

    def cancel(self, ids: Collection[str]) -> None:
        asyncio.run(self.queue.cancel(ids))

    def tagged(self) -> dict[str, str]:
        return asyncio.run(self.queue.tagged())

    def wait(
        self,
        ids: Collection[str],
        *states: JobState,
        what: Callable[[QueueStatus], object] = lambda _: True,
    ) -> list[QueueStatus]:
        """Wait until all jobs are in one of these states."""

        def reached() -> list[QueueStatus]:
            seen = list(self.query(ids).values())
            well = all(job.state in states and what(job) for job in seen)
            return seen if well and len(seen) == len(ids) else []

        return wait_for(reached, 30, f"{ids} to be {states}", interval=0.2)

    def log(self, job_id: str, logs: str = "logs") -> Path:
        return self.folder / logs / f"queue-{job_id}.log"


@pytest.fixture
def door(slurm: SlurmSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Door:
    monkeypatch.setenv("SLURM_CONF", slurm.env["SLURM_CONF"])
    return Door(slurm, tmp_path)


@pytest.fixture
def accounted(slurm_accounting: SlurmSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Door:
    monkeypatch.setenv("SLURM_CONF", slurm_accounting.env["SLURM_CONF"])
    return Door(slurm_accounting, tmp_path)


def wrap(program: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Put a command that is counted before the real one on PATH."""
    place = folder / "bin"
    place.mkdir(exist_ok=True)
    command = Command(place, program)
    monkeypatch.setenv("PATH", str(place), prepend=os.pathsep)
    return command


def test_array_from_pending_to_its_ends(door):
    command = """
case $ID in
    *_0) exit 0 ;;
    *_1) exit 3 ;;
    *_2) kill -KILL $$ ;;
    *_3) bash -c 'kill -SEGV $$' ;;
    *) exec sleep 1000 ;;
esac"""
    ids = door.submit(command, 10, request={"gpus": 2})  # 4 nodes have 2 each
    job = ids[0].removesuffix("_0")
    assert ids == [f"{job}_{n}" for n in range(10)]

    over = door.wait(ids[:4], *OVER)
    assert [(seen.state, seen.exit_code) for seen in over] == [
        (JobState.COMPLETED, 0),
        (JobState.FAILED, 3),
        (JobState.FAILED, 137),
        (JobState.FAILED, 139),
    ]
    assert over[1].reason == "NonZeroExitCode"

    running = door.wait(ids[4:8], JobState.RUNNING)
    assert sorted(seen.nodes for seen in running) == ["node1", "node2", "node3", "node4"]
    for seen in running:
        assert seen.started is not None
        assert abs(time.time() - seen.started) < 300
        assert seen.ends == seen.started + 30 * 60  # dask-jobqueue's default walltime
    waiting = door.wait(ids[8:], JobState.PENDING, what=lambda seen: seen.reason)
    # The last is what SLURM 23.11 says where there is no accounting
    assert {seen.reason for seen in waiting} <= {"Resources", "Priority", "InvalidAccount"}
    assert {(seen.started, seen.ends, seen.nodes) for seen in waiting} == {(None, None, "")}

    door.cancel([ids[4], ids[8], ids[0]])  # running, pending, over
    (ended,) = door.wait([ids[4]], JobState.CANCELLED)
    assert ended.exit_code == 143
    assert door.query([ids[8]]) == {}  # has no record of its own
    assert door.departed([ids[8]]) == {
        ids[8]: QueueStatus(ids[8], JobState.CANCELLED, "before it started")
    }
    assert door.query([ids[9]])[ids[9]].state not in OVER
    assert door.query([ids[0]])[ids[0]].state is JobState.COMPLETED
    assert door.query([ids[5]])[ids[5]].state is JobState.RUNNING


def test_what_a_job_learns_of_itself(door, monkeypatch):
    # As in a notebook that runs in a job's element
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "1")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "5")
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "5")
    monkeypatch.setenv("SBATCH_JOB_NAME", "other")
    monkeypatch.setenv("SQUEUE_PARTITION", "other")
    command = 'echo "$ID $RESTARTS $SLURM_JOB_NAME $SLURM_MEM_PER_CPU $CUDA_VISIBLE_DEVICES"'
    ids = door.submit(command, 2)
    door.wait(ids, JobState.COMPLETED)
    for job_id in ids:
        assert door.log(job_id).read_text().split() in (
            [job_id, "0", "train", "0"],
            [job_id, "0", "train", "1"],
        )
        assert stat.S_IMODE(door.log(job_id).stat().st_mode) == 0o600


def test_a_site_without_arrays_that_takes_few_jobs(slurm_programs, tmp_path, monkeypatch):
    conf = {"MaxArraySize": 0, "MaxJobCount": 3}
    with SlurmSite(nodes=1, conf=conf) as site:
        monkeypatch.setenv("SLURM_CONF", site.env["SLURM_CONF"])
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "7")
        door = Door(site, tmp_path)
        assert asyncio.run(door.queue.limit()) == 1
        (job_id,) = door.submit('echo "$ID"', logs="50% of\"it's")
        assert job_id.isdecimal()
        door.wait([job_id], JobState.COMPLETED)
        (log,) = door.log(job_id, "50% of\"it's").parent.iterdir()
        assert log.name.startswith(f"queue-{job_id}_")  # %a of no array is 4294967294
        assert log.read_text() == f"{job_id}\n"
        door.queue.timeout_s = 6  # sbatch itself waits and tries again, for minutes

        def fill() -> None:
            for _ in range(3):  # what is over counts too
                door.submit(request={"gpus": 0})

        with pytest.raises(Refused, match="unable to accept job") as caught:
            fill()
        assert caught.value.for_now


def test_the_users_gres_and_memory_are_in_the_queues_record(door):
    """Regression: of two --gres sbatch took the last, and --mem excludes --mem-per-gpu."""
    own = ["--gres=nvme:100", "--mem-per-gpu=50M"]
    (job_id,) = door.submit(job_extra_directives=own)
    columns = "--Format=tres-per-node:50,MinMemory:50"
    shown = door.site.run("squeue", "-h", "-j", job_id, columns).stdout.split()
    assert shown[0].replace("gres/", "gres:") == "gres:gpu:1,gres:nvme:100"
    asked = door.site.run("scontrol", "show", "job", job_id).stdout
    assert "MemPerTres=gres:gpu:50" in asked.replace("gres/", "gres:")
    door.cancel([job_id])


def test_any_name_and_path(door):
    names = ["two words", "it's", '"', "a;b", "a #b", "%j", "$HOME `id`", "-x", "'b\"c;d #e\\"]
    folders = {name: name.replace("\\", "") for name in names}
    ids = {
        name: door.submit("echo done", request={"name": name}, logs=folders[name])[0]
        for name in names
    }
    door.wait(ids.values(), JobState.COMPLETED)
    for name, job_id in ids.items():
        assert door.log(job_id, folders[name]).read_text() == "done\n"
        shown = door.site.run("squeue", "-h", "-t", "all", "-j", job_id, "-o", "%j|%k").stdout
        assert shown == f"{name}|{TAG}\n"


def test_several_nodes(door):
    ids = door.submit(
        "echo $SLURM_JOB_NUM_NODES $SLURM_NTASKS $CUDA_VISIBLE_DEVICES",
        request={"nodes": 2, "gpus": 4},
    )
    (seen,) = door.wait(ids, JobState.COMPLETED)
    assert door.log(ids[0]).read_text() == "2 2 0,1\n"
    assert seen.nodes.startswith("node[")


@pytest.mark.parametrize("form", ["gpus-per-node", "gpus"])
def test_other_requests_of_gpus(door, form):
    door.queue.gpu_request = form
    ids = door.submit("echo $CUDA_VISIBLE_DEVICES", request={"gpus": 2})
    door.wait(ids, JobState.COMPLETED)
    assert door.log(ids[0]).read_text() == "0,1\n"


def test_requeued(door):
    # what ignores SIGTERM lives for KillWait, 15 s
    stubborn = """case "$ID $RESTARTS" in *"_0 0") trap '' TERM ;; esac"""
    ids = door.submit(f"{stubborn}; echo $RESTARTS; while :; do sleep 0.5; done", 2)
    door.wait(ids, JobState.RUNNING, what=lambda seen: seen.reason == "")
    log = door.log(ids[0])  # which comes a moment after the job starts
    wait_for(lambda: log.exists() and log.read_text() == "0\n", 10, "its trap to be set")
    door.site.run("scontrol", "requeue", ids[0])
    seen = door.query(ids)[ids[0]]  # its first life still ends
    assert (seen.state, seen.reason, seen.restarts) == (JobState.REQUEUED, "COMPLETING", 1)
    (seen,) = door.wait(ids[:1], JobState.REQUEUED, what=lambda seen: seen.reason == "BeginTime")
    assert (seen.restarts, seen.started, seen.ends) == (1, None, None)
    (seen,) = door.wait(ids[:1], JobState.RUNNING)
    assert seen.restarts == 1
    wait_for(lambda: "1\n" in log.read_text(), 10, "the second life's log")
    assert door.query(ids)[ids[1]].restarts == 0


def test_only_what_is_asked_for_with_one_call(door, monkeypatch):
    squeue = wrap("squeue", door.folder, monkeypatch)
    ids = door.submit(count=600, request={"gpus": 0})
    asked = [*ids, "999999", "999999_3"]
    start = clock()
    assert set(door.query(asked)) == set(ids)
    assert clock() - start < 10
    assert door.query(ids[:1]).keys() == {ids[0]}
    assert door.query([]) == {}
    assert len(squeue.calls()) == 2
    scancel = wrap("scancel", door.folder, monkeypatch)
    door.cancel(asked[100:])
    left = door.tagged()
    assert set(left) == set(ids[:100])
    door.cancel(ids)
    assert len(scancel.calls()) == 2


def test_tagged_are_only_live_jobs_of_hpcdask(door):
    ids = door.submit(count=2)
    (over,) = door.submit("exit 0")
    door.wait([over], JobState.COMPLETED)
    plain = ["--mem=100", "-o", "/dev/null", "--wrap", SLEEP]
    door.site.submit(*plain)
    door.site.submit("--comment=other:hpcdask:1", *plain)
    odd = door.site.submit("--comment=hpcdask:a;b\nc", "-H", *plain)
    assert door.tagged() == {**dict.fromkeys(ids, TAG), str(odd): "hpcdask:a;b"}


@pytest.mark.parametrize(
    ("keywords", "request_", "words", "advice"),
    [
        ({"queue": "a b"}, {}, "Invalid partition name specified", "sinfo -s"),
        ({}, {"gpu_type": "h100"}, "Requested node configuration is not available", "%P %G"),
        ({}, {"gpus": 3}, "Requested node configuration is not available", "%P %G"),
        (
            {"job_extra_directives": ["--mem=1T"]},
            {},
            "Memory spec",
            "Asked: 1T a node; ",
        ),
        ({"walltime": "two"}, {}, "Invalid --time specification", "%P %l"),
        ({"job_extra_directives": ["-C x"]}, {}, "Invalid feature specification", "%P %f"),
    ],
)
def test_refused(door, keywords, request_, words, advice):
    with pytest.raises(Refused) as caught:
        door.submit(request=request_, **keywords)
    assert not caught.value.for_now
    text = str(caught.value)
    assert text.startswith("sbatch refused the job: ")
    assert words in text
    assert f"Script kept at {door.path}. " in text
    assert advice in text
    assert "\n" not in text


def test_too_many_for_one_array_may_be_fewer(door):
    limit = asyncio.run(door.queue.limit())
    assert limit == 1001
    with pytest.raises(Refused, match="Invalid job array specification") as caught:
        door.submit(count=limit + 1)
    assert caught.value.for_now


def test_greetings_and_clusters_before_and_after_the_id(door, monkeypatch):
    sbatch = wrap("sbatch", door.folder, monkeypatch)
    sbatch.behave("echo Welcome 5; echo '12;site'; exit")
    assert door.submit(count=2) == ["12_0", "12_1"]


def test_an_array_with_many_gaps_is_shown_whole(door):
    ids = door.submit(count=400, request={"gpus": 2})
    gone = [job_id for n, job_id in enumerate(ids) if 1 in (n % 2, n % 7)]
    kept = set(ids) - set(gone)
    door.cancel(gone)

    def shown() -> set[str]:
        seen = door.query(ids)
        return set(seen) if len(seen) <= len(kept) + 4 else set()  # at most four ran

    assert wait_for(shown, 20, "some to be cancelled") >= kept
    door.site.run("scancel", ids[0].partition("_")[0])
    wait_for(lambda: not door.tagged(), 20, "all to end")
    seen = door.query(ids)
    seen |= door.departed([job_id for job_id in ids if job_id not in seen])
    assert set(seen) == set(ids)
    assert {job.state for job in seen.values()} == {JobState.CANCELLED}


def test_without_accounting_nobody_knows_of_departed_jobs(door, monkeypatch):
    sacct = wrap("sacct", door.folder, monkeypatch)
    assert door.departed(["999999_1"]) == {}
    assert not sacct.calls()


# With accounting


@pytest.mark.long
def test_departed(accounted, monkeypatch):
    command = "case $ID in *_0) exit 0 ;; *_1) exit 3 ;; *_2) kill -KILL $$ ;; esac; exec sleep 99"
    ids = accounted.submit(command, 5, request={"gpus": 0})
    accounted.wait(ids[:3], *OVER)
    accounted.wait(ids[3:], JobState.RUNNING)
    accounted.cancel([ids[3]])
    accounted.wait([ids[3]], JobState.CANCELLED)
    sacct = wrap("sacct", accounted.folder, monkeypatch)

    def known() -> dict[str, QueueStatus]:
        seen = accounted.departed([*ids, "999999_1", "999999"])
        return seen if len(seen) == 4 else {}

    seen = wait_for(known, 20, "accounting to know them", interval=0.3)
    assert {job_id: (job.state, job.exit_code) for job_id, job in seen.items()} == {
        ids[0]: (JobState.COMPLETED, 0),
        ids[1]: (JobState.FAILED, 3),
        ids[2]: (JobState.FAILED, 137),
        ids[3]: (JobState.CANCELLED, None),
    }
    assert seen[ids[3]].reason.startswith("by ")
    assert seen[ids[0]].nodes.startswith("node")
    assert abs(time.time() - seen[ids[0]].started) < 300
    before = len(sacct.calls())
    accounted.departed(ids)
    assert len(sacct.calls()) == before + 1


def test_invalid_account_and_qos(accounted):
    with pytest.raises(Refused, match=r"Invalid account .*Accounts: sacctmgr show assoc") as caught:
        accounted.submit(account="nobody's")
    assert not caught.value.for_now
    with pytest.raises(Refused, match=r"Invalid qos .*sacctmgr show qos") as caught:
        accounted.submit(job_extra_directives=["-q nope"])
    assert not caught.value.for_now


def test_submit_limit(accounted):
    site = accounted.site
    limit = ("sacctmgr", "-i", "modify", "qos", "normal", "set")
    site.run(*limit, "MaxSubmitJobsPerUser=3")
    try:
        ids = accounted.submit(count=2)
        with pytest.raises(Refused, match="QOSMaxSubmitJobPerUserLimit") as caught:
            accounted.submit(count=2)
        assert caught.value.for_now
        assert len(accounted.submit(count=1)) == 1
        assert set(accounted.query(ids)) == set(ids)
        site.cancel_all()
        assert len(accounted.submit(count=3)) == 3
    finally:
        site.run(*limit, "MaxSubmitJobsPerUser=-1")


def test_a_limit_that_does_not_pass(accounted):
    site = accounted.site
    limit = ("sacctmgr", "-i", "modify", "qos", "normal", "set")
    site.run(*limit, "MaxWall=5", "Flags=DenyOnLimit")
    try:
        with pytest.raises(Refused, match="QOSMaxWallDurationPerJobLimit") as caught:
            accounted.submit(walltime="6")
        assert not caught.value.for_now
    finally:
        site.run(*limit, "MaxWall=-1", "Flags=-1")
