"""Clusters with workers of several kinds; processes of this machine are the queue."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import dask
import pytest

import hpcdask
from hpcdask.errors import JobsFailed, UsageError
from hpcdask.queues.job_state import OVER
from launching import run_cli, wait_for

ONE = {"device": "cpu", "cores": 1, "processes": 1, "memory": "512MiB", "poll_interval": 0.3}
#: Stand-ins for workers on GPUs, and workers on the CPU.
BOTH = {"gpu": {"resources": {"GPU": 1, "CPU": 0}}, "cpu": {"nthreads": 2}}


def make(folder: Path, **keywords) -> hpcdask.LocalCUDAJobCluster:
    options = {**ONE, "groups": BOTH, "shared_temp_directory": str(folder), **keywords}
    return hpcdask.LocalCUDAJobCluster(**options)


def live(cluster: hpcdask.LocalCUDAJobCluster) -> Counter[str]:
    """How many jobs of each group are not over."""
    return Counter(job.group for job in cluster.jobs() if job.state not in OVER)


def running(cluster: hpcdask.LocalCUDAJobCluster) -> dict[str, int]:
    """How many workers of each group are connected."""
    return dict(Counter(job.group for job in cluster.jobs() for _ in job.workers))


def dask_tasks() -> tuple[Callable[[], str], Callable[[int], str]]:
    """Functions that travel as they are: workers do not know this module."""

    def named() -> str:
        from distributed import get_worker

        return str(get_worker().name)

    def slow(_: int) -> str:
        time.sleep(0.3)
        return named()

    return named, slow


named, slow = dask_tasks()


# Up and down


def test_groups_up_and_down(folder: Path):
    with make(folder, walltime="00:20:00") as cluster, cluster.get_client() as client:
        real, asked = cluster.queue.query, []

        async def query(ids):
            asked.append((time.monotonic(), sorted(ids)))
            return await real(ids)

        cluster.queue.query = query
        cluster.scale(gpu=1, cpu=2)
        assert live(cluster) == {"gpu": 1, "cpu": 2}  # there when `scale` returns
        client.wait_for_workers(3, timeout=180)
        wait_for(lambda: running(cluster) == {"gpu": 1, "cpu": 2}, 20, "all workers")
        info = client.sync(client.scheduler.identity, n_workers=-1)["workers"].values()
        found = {(one["nthreads"], *sorted(one["resources"].items())) for one in info}
        assert found == {(1, ("CPU", 0), ("GPU", 1)), (2, ("CPU", 1))}
        assert all(re.search(r"-\w{6}\.(gpu|cpu)-", one["name"]) for one in info)

        on_gpu = client.map(lambda _: named(), range(4), pure=False, resources={"GPU": 1})
        with dask.annotate(resources={"CPU": 1}):
            parts = [dask.delayed(named, pure=False)() for _ in range(4)]
        on_cpu = client.compute(parts, optimize_graph=False)
        assert all(".gpu-" in name for name in client.gather(on_gpu))
        assert all(".cpu-" in name for name in client.gather(on_cpu))
        assert client.submit(sum, [1, 2]).result(timeout=180) == 3

        tables = (repr(cluster.jobs()), cluster.jobs()._repr_html_())
        assert all("group" in table and "gpu" in table for table in tables)
        for text in (repr(cluster), cluster._repr_html_()):
            assert "1 gpu running" in text
            assert "2 cpu running" in text
        ids = sorted(job.id for job in cluster.jobs())
        wait_for(lambda: any(some == ids for _, some in asked), 20, "one query for all")
        count = len(asked)
        wait_for(lambda: len(asked) > count + 5, 60, "more queries")
        times = [at for at, _ in asked[count:]]
        assert all(later - at >= 0.3 for at, later in itertools.pairwise(times))
        assert Counter(row["group"] for row in rows_of(cluster, folder)) == {"gpu": 1, "cpu": 2}
        assert "gpu" in run_cli("list", "--jobs", "--folder", folder).stdout

        held = client.submit(os.urandom, 8, pure=False, resources={"CPU": 1})
        value = held.result(timeout=180)
        cluster.scale(cpu=1)
        wait_for(lambda: live(cluster) == {"gpu": 1, "cpu": 1}, 60, "one to leave")
        assert held.result(timeout=180) == value
        cluster.scale(cpu=0, gpu=2)
        wait_for(lambda: running(cluster) == {"gpu": 2}, 60, "the other group")
    assert not live(cluster)
    assert (folder / cluster.id / "script-gpu.sh").exists()
    assert "--cluster" in cluster.job_script("cpu")
    assert cluster.job_script("gpu") != cluster.job_script("cpu")


def rows_of(cluster: hpcdask.LocalCUDAJobCluster, folder: Path) -> list[dict]:
    """Return the listed jobs of this cluster; others of the same machine may have jobs, too."""
    rows = json.loads(run_cli("list", "--jobs", "--json", "--folder", folder).stdout)
    return [row for row in rows if row["cluster"] == cluster.id]


# Faults


@pytest.mark.long
def test_a_group_that_fails_does_not_stop_the_other(folder: Path, capfd):
    groups = {"bad": {"python": "false", "resources": {"BAD": 1}}, "good": {}}
    with make(folder, groups=groups) as cluster, cluster.get_client() as client:
        cluster.scale(bad=2, good=1)
        client.wait_for_workers(1, timeout=180)
        never = client.submit(named, pure=False, resources={"BAD": 1})
        with pytest.raises(JobsFailed, match=r"group bad: \d jobs in a row ended before"):
            never.result(timeout=180)
        assert str(cluster.failure).startswith("group bad: ")
        assert "failed: group bad: " in repr(cluster)
        assert ".good-" in client.submit(named, pure=False).result(timeout=180)
        cluster.scale(good=2)
        cluster.wait_for_workers(2, timeout=180)
        assert running(cluster) == {"good": 2}
        with pytest.raises(JobsFailed, match="group bad"):
            cluster.wait_for_workers(3, timeout=180)
        # Dask tasks that no group can run are left to Dask, as they are elsewhere
        foreign = client.submit(named, pure=False, resources={"OTHER": 1})
        wait_for(lambda: foreign.key in client.who_has() or foreign.status == "pending", 10)
        cluster.scale(bad=0)
        assert cluster.failure is None
        cluster.scale(good=1)
        wait_for(lambda: live(cluster) == {"good": 1}, 60, "one to leave")
        assert foreign.status == "pending"
    assert "error: group bad: " in capfd.readouterr().err


# Adaptive scaling


def test_each_group_follows_the_dask_tasks_that_only_it_can_run(folder: Path):
    bounds = {"gpu": (0, 2), "cpu": (0, 1)}
    with make(folder) as cluster, cluster.get_client() as client:
        adaptive = cluster.adapt(**bounds, interval="200ms", target_duration="1s")
        on_cpu = client.map(slow, range(8), pure=False, resources={"CPU": 1})
        assert all(".cpu-" in name for name in client.gather(on_cpu))
        assert {job.group for job in cluster.jobs()} == {"cpu"}
        on_gpu = client.map(slow, range(30), pure=False, resources={"GPU": 1})
        wait_for(lambda: running(cluster).get("gpu") == 2, 180, "two for the other group")
        assert all(".gpu-" in name for name in client.gather(on_gpu))
        del on_cpu, on_gpu
        wait_for(lambda: not live(cluster), 60, "all to leave")
        adaptive.stop()
        cluster.scale(cpu=1)
        cluster.adapt(gpu=(1, 1))  # the other one stays
        wait_for(lambda: live(cluster) == {"gpu": 1, "cpu": 1}, 60, "both")


# What is not understood


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({}, "groups={} is not a dict of groups, each"),
        ({"a-b": {}}, "groups: 'a-b' is not a name for a group: a letter"),
        ({"jobs": {}}, "groups: 'jobs' is not a name for a group"),
        ({"gpu": 3}, "groups={'gpu': 3} is not a dict of groups, each a dict of keywords"),
        ({"gpu": {"gpus": 1}}, "group gpu: unknown keyword gpus: did you mean gpus_per_job?"),
        ({"gpu": {"device": "tpu"}}, "group gpu: device: 'tpu' is not one of"),
        ({"gpu": {"poll_interval": 3}}, "group gpu: poll_interval is for all groups"),
    ],
)
def test_groups_that_are_not_understood(tmp_path: Path, groups, message: str):
    with pytest.raises(UsageError, match=re.escape(message)):
        make(tmp_path, groups=groups)
    assert not list(tmp_path.iterdir())


def test_a_system_s_own_keyword_is_the_cluster_s(tmp_path: Path):
    options = {**ONE, "shared_temp_directory": str(tmp_path)}
    with pytest.raises(UsageError, match="group a: gpu_request is for all groups"):
        hpcdask.SLURMCUDACluster(**options, groups={"a": {"gpu_request": "gpus"}})
    groups = {"a": {"walltime": "01:00:00", "queue": "one"}, "b": {"protocol": "tcp"}}
    with hpcdask.SLURMCUDACluster(**options, walltime="02:00:00", groups=groups) as cluster:
        one, other = (cluster.job_script(name) for name in "ab")
        assert "-p one\n" in one
        assert "-t 01:00:00\n" in one
        assert "-t 02:00:00\n" in other
        assert f"hpcdask:{cluster.id}.b" in other
        assert cluster.job_script() == one
        with pytest.raises(UsageError, match=r"job_script: no group c\. There are a, b"):
            cluster.job_script("c")


CALLS = {
    "scale(3)": r"scale: this cluster has groups, so name them: scale\(gpu",
    "scale(tpu=1)": "scale: no keyword and no group tpu. There are gpu, cpu",
    "scale(gpu=-1)": "scale: gpu: -1 is not a whole number",
    "adapt(maximum=3)": "adapt: this cluster has groups",
    "adapt(tpu=(0, 1))": "adapt: no keyword and no group tpu",
    "adapt(intervall=1)": "adapt: no keyword and no group intervall. Did you mean interval?",
    "adapt(gpu=3)": "adapt: gpu=3 is not a least and a most number",
    "adapt(gpu=(3, 1))": "adapt: between a minimum of 3 and a maximum of 1 workers",
}
WITHOUT_GROUPS = {
    "scale(gpu=1)": r"scale: no keyword and no group gpu\. This cluster",
    "adapt(gpu=(0, 1))": "adapt: no keyword and no group gpu",
    "adapt(max=2)": r"adapt: no keyword and no group max\. Did you mean maximum\? ",
    "adapt(maximum_workers=2)": "adapt: no keyword and no group maximum_workers",
}


@pytest.mark.parametrize(("groups", "calls"), [(BOTH, CALLS), (None, WITHOUT_GROUPS)])
def test_calls_that_are_not_understood(folder: Path, groups: dict, calls: dict):
    with make(folder, groups=groups) as cluster:
        for call, message in calls.items():
            with pytest.raises(UsageError, match=message):
                eval(f"cluster.{call}")
        assert cluster.jobs() == ()
