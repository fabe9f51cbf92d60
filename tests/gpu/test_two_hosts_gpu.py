"""Runs over two hosts with a GPU each, which namespaces make of one machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.hosts import Hosts, missing, over
from clock import clock
from hpcdask.gpu.devices import Gpu
from launching import unavailable
from running import Site

pytestmark = pytest.mark.gpu

EXCHANGE = """
import json, os, sys, time
import dask.array as da, numpy as np
from distributed import Client

def block(block_id=None):
    import cupy
    i, j = block_id
    return cupy.full((1000, 1000), 10.0 * i + j)

def transports(dask_worker):
    return list(dask_worker.peer_transports.values())

client = Client()
x = da.map_blocks(block, chunks=((1000,) * 4, (1000,) * 4), dtype=float, meta=np.empty((0, 0)))
y = (x + x.T).map_blocks(lambda b: b.get(), meta=np.empty((0, 0))).compute()
expected = np.kron([[11.0 * (i + j) for j in range(4)] for i in range(4)], np.ones((1000, 1000)))
workers = client.scheduler_info()["workers"]
print("exchanged", json.dumps({
    "right": bool((y == expected).all()),
    "transports": sorted({one for found in client.run(transports).values() for one in found}),
    "hosts": sorted(one["host"] for one in workers.values()),
    "devices": sorted(client.run(os.getenv, "CUDA_VISIBLE_DEVICES").values()),
}), flush=True)
while "stay" in sys.argv:
    client.submit(abs, time.time()).result()
    time.sleep(0.1)
"""


@pytest.fixture
def site(gpus: list[Gpu], tmp_path: Path) -> Iterator[tuple[Site, Hosts]]:
    if len(gpus) < 2:
        pytest.skip("needs two GPUs")
    if shutil.which("ip") is None:
        pytest.skip("no ip (iproute2) on this machine")
    if why := missing():
        unavailable(why)
    with Hosts(tmp_path, gpus=True) as hosts, Site(over(hosts, "openmpi")) as site:
        (site.folder / "exchange.py").write_text(EXCHANGE)
        yield site, hosts


@pytest.mark.parametrize("protocol", ["auto", "ucx"])
def test_device_arrays_go_from_host_to_host(
    site: tuple[Site, Hosts], gpus: list[Gpu], protocol: str
) -> None:
    run, hosts = site
    ended = run.run("--protocol", protocol, "exchange.py", device="cuda", timeout=150, find=False)
    since = clock()
    assert ended.code == 0, str(ended)
    assert "2 workers on 2 nodes" in ended.err, str(ended)
    told = json.loads(ended.out.split("exchanged ")[1].splitlines()[0])
    assert told["right"]
    assert told["hosts"] == hosts.addresses
    assert told["transports"] == (["ucx"] if protocol == "ucx" else [])
    assert sorted(told["devices"]) == sorted(gpu.uuid for gpu in gpus[:2])
    run.check_nothing_left(since)


def test_a_lost_host_ends_the_run(site: tuple[Site, Hosts]) -> None:
    run, hosts = site
    quick = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "15s"}
    running = run.start("exchange.py", "stay", device="cuda", env=quick, find=False)
    running.line("exchanged", timeout=150)
    hosts.join(up=False)
    running.line(f"hpcdask: error: rank 1 on {hosts.names[1]}", stream="err", timeout=120)
    hosts.join(up=True)
    ended = running.end(120)
    assert ended.code != 0
    run.check_nothing_left(ended.at, within=30)
