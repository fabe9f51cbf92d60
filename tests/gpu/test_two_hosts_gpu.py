"""Runs over two hosts with a GPU each, which namespaces make of one machine."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from chaos.hosts import Hosts, missing, over
from gpu_launching import EXCHANGE
from hpcdask.gpu.devices import Gpu
from launching import unavailable
from running import Site

pytestmark = pytest.mark.gpu


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
    ended = run.run("--protocol", protocol, "exchange.py", device="cuda", timeout=150)
    assert "2 workers on 2 nodes" in ended.err, str(ended)
    told = ended.told("exchanged")
    assert told["right"]
    assert told["hosts"] == hosts.addresses
    assert told["transports"] == (["ucx"] if protocol == "ucx" else [])
    assert sorted(told["devices"]) == sorted(gpu.uuid for gpu in gpus[:2])
    run.check_nothing_left()


def test_a_lost_host_ends_the_run(site: tuple[Site, Hosts]) -> None:
    run, hosts = site
    quick = {"DASK_DISTRIBUTED__COMM__TIMEOUTS__TCP": "15s"}
    running = run.start("exchange.py", "stay", device="cuda", env=quick)
    running.line("exchanged", timeout=150)
    hosts.join(up=False)
    running.line(f"hpcdask: error: rank 1 on {hosts.names[1]}", stream="err", timeout=120)
    hosts.join(up=True)
    ended = running.end(120)
    assert ended.code != 0
    run.check_nothing_left(within=30)
