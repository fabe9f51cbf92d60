"""Runs over two hosts: network namespaces with names and addresses of their own, and a cable."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from chaos.hosts import Hosts, over
from running import Site

pytestmark = [pytest.mark.mpi, pytest.mark.slow]
ARRAY = 2000 * 2000 * 8  # bytes of the program's array


def sent(hosts: Hosts) -> int:
    """Bytes that have gone over the cable, both ways."""
    name, link = hosts.names[0], hosts.links[0]
    told = subprocess.run(
        ["ip", "-n", name, "-s", "-j", "link", "show", link], capture_output=True, check=True
    )
    (one,) = json.loads(told.stdout)
    return one["stats64"]["rx"]["bytes"] + one["stats64"]["tx"]["bytes"]


@pytest.mark.parametrize("launcher", ["openmpi", pytest.param("mpich", marks=pytest.mark.long)])
def test_arrays_over_two_hosts(hosts: Hosts, launcher: str) -> None:
    with Site(over(hosts, launcher)) as site:
        ended = site.run("two_hosts.py", timeout=120)
        assert not ended.errors, str(ended)
        assert "2 workers on 2 nodes (2 x CPU), tcp with TLS" in ended.err
        assert ended.told("hosts") == hosts.addresses
        assert ARRAY < sent(hosts) < 12 * ARRAY
        site.check_nothing_left()


PROGRAM = (
    "import hpcdask; client = hpcdask.connect('cluster.json');"
    "print(client.submit(sum, [1, 2]).result(), len(client.run(abs, 1)));"
    "client.shutdown()"
)


@pytest.mark.long
def test_a_client_of_the_other_host_by_a_scheduler_file(hosts: Hosts) -> None:
    with Site(over(hosts, "mpich")) as site:
        run = site.start("--scheduler-file", "cluster.json")
        run.line("hpcdask: scheduler at", stream="err", timeout=120)
        command = [str(hosts.wrapper), hosts.addresses[1], sys.executable, "-c", f'"{PROGRAM}"']
        done = subprocess.run(
            command, cwd=site.folder, env=site.launcher.env, capture_output=True, text=True
        )
        assert done.stdout.split() == ["3", "2"], done.stderr
        run.end(60, code=0)
        site.check_nothing_left()


def test_a_network_that_is_lost_for_a_while_ends_no_run_and_a_lost_host_is_named(
    hosts: Hosts,
) -> None:
    """Regression: ten seconds ended the run. After 40 s without an answer a connection ends."""
    with Site(over(hosts, "mpich")) as site:
        quick = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "40s"}
        run = site.start("two_hosts.py", "stay", env=quick)
        run.line("computed", timeout=120)
        hosts.join(up=False)
        time.sleep(12)
        hosts.join(up=True)
        since = len(run.lines["out"])
        run.wait_for(lambda: len(run.lines["out"]) > since + 20, "more results", timeout=60)
        hosts.join(up=False)
        run.line(f"hpcdask: error: rank 1 on {hosts.names[1]}", stream="err", timeout=120)
        hosts.join(up=True)  # mpiexec waits for its ssh to the lost host, however long
        assert run.end(120).code != 0
        site.check_nothing_left(within=30)
