"""Clusters of jobs whose ports come from a range: all that their processes listen on."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

import hpcdask
from hpcdask.errors import UsageError
from hpcdask.jobs.folder import list_clusters
from launching import leftovers
from listeners import free_range, listening_ports, text

ONE = {"device": "cpu", "cores": 1, "processes": 1, "memory": "512MiB", "poll_interval": 0.3}


def test_a_cluster(marker: str, tmp_path: Path):
    ports, before = free_range(40), listening_ports([psutil.Process()])
    options = {"shared_temp_directory": str(tmp_path), "n_workers": 2, **ONE}
    with hpcdask.LocalCUDAJobCluster(port_range=text(ports), **options) as cluster:
        cluster.wait_for_workers(2, timeout=180)
        now = listening_ports([psutil.Process()])
        own = [port for sock, port in now.items() if sock not in before]
        jobs = listening_ports(leftovers(marker)).values()
        with cluster.get_client() as client:
            contexts = hpcdask.gang(lambda context: context.master_port, client=client, size=2)
        script = cluster.job_script()
    assert len(own) == 2  # scheduler, dashboard
    assert len(jobs) == 6
    assert {*own, *jobs} < set(ports), (own, jobs)
    assert set(contexts) < set(ports)
    assert f"--port-range {text(ports)}" in script


def test_what_is_refused(tmp_path: Path):
    options = {"shared_temp_directory": str(tmp_path), **ONE}
    with pytest.raises(UsageError, match=r"port_range: '80' is not a range of ports"):
        hpcdask.LocalCUDAJobCluster(port_range="80", **options)
    with pytest.raises(UsageError, match=r"has 2 ports, and 1 worker per node need at least 3"):
        hpcdask.LocalCUDAJobCluster(port_range="20000-20001", **options)
    assert not list_clusters(tmp_path)
    groups = {"one": {"port_range": "20000-20999"}}
    with pytest.raises(UsageError, match="group one: port_range is for all groups"):
        hpcdask.LocalCUDAJobCluster(groups=groups, **options)
