"""Data goes straight between the program and the workers, where it can reach them."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from urllib.parse import urlsplit

import pytest

from launching import unavailable
from running import PROGRAMS, Site, under
from tunnel import forward

pytestmark = pytest.mark.mpi


def test_data_does_not_go_through_the_scheduler_and_survives_a_worker(site: Site):
    result = site.run("moves_data.py", timeout=120).told("result")
    assert result["same"]
    assert result["direct"]
    assert result["sums"] == [3_000_000.0 * sum(range(8))] * 2
    assert result["grown"] < result["moved"] / 10, result


@pytest.mark.parametrize("choice", ["False", "True"])
def test_the_user_s_choice_of_the_way_stands(site: Site, choice: str):
    program = (
        "from distributed import Client\n"
        "client = Client()\n"
        "print(client.direct_to_workers, client.submit(abs, -1).result())\n"
    )
    env = {"DASK_DISTRIBUTED__CLIENT__DIRECT_TO_WORKERS": choice}
    assert site.run(program=program, env=env).out.split() == [choice, "1"]


@under("alone")
def test_a_client_behind_a_tunnel_uses_the_scheduler_and_says_so_once(site: Site):
    isolated = ["unshare", "--net", "--map-root-user"]
    if not shutil.which("unshare") or subprocess.run([*isolated, "true"]).returncode:
        unavailable("no network namespaces")
    run = site.start("--scheduler-file", "cluster.json")
    run.line("hpcdask: scheduler at", stream="err", timeout=120)
    file, way_out = site.folder / "cluster.json", site.folder / "tunnel"
    there = urlsplit(json.loads(file.read_text())["address"])
    with socket.socket(socket.AF_UNIX) as listener:  # which any network reaches
        listener.bind(str(way_out))
        listener.listen()
        forward(listener, lambda: socket.create_connection((there.hostname, there.port)))
        done = subprocess.run(
            [*isolated, sys.executable, PROGRAMS / "tunnelled.py", file, way_out],
            env=site.launcher.env,
            capture_output=True,
            text=True,
            timeout=120,
        )
        listener.shutdown(socket.SHUT_RDWR)
    assert done.returncode == 0, done.stderr
    assert done.stdout == 'result {"sum": 3, "direct": null}\n'
    assert done.stderr.count("hpcdask: results and scattered data go through the scheduler") == 1
