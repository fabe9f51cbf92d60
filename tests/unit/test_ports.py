"""Ports from a range: what is understood, which is taken, what is said when there is none."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import replace
from types import SimpleNamespace

import dask
import pytest
from click.testing import CliRunner
from distributed import Nanny, Scheduler
from distributed.comm import get_address_host_port
from tornado import netutil

from hpcdask import cli
from hpcdask.bootstrap.ranks import Rank
from hpcdask.client import gang
from hpcdask.clusters.scheduler import ClusterScheduler, read_scheduler_options
from hpcdask.comm.fabric import Fabric
from hpcdask.comm.ucx_config import ucx_environment
from hpcdask.doctor import ports as doctor_ports
from hpcdask.doctor.launch import Launch
from hpcdask.doctor.launch import check as check_launch
from hpcdask.errors import ClusterError, UsageError
from hpcdask.node.device_worker import DeviceWorker
from hpcdask.node.placement import Inventory
from hpcdask.runner.link import Listener
from hpcdask.runner.plan import make_plan
from hpcdask.security import ports
from hpcdask.spec.parsing import parse_port_range
from hpcdask.spec.specs import RunSpec, WorkerSpec
from listeners import free_range, is_free, text


def bound(port: int) -> socket.socket:
    """Listen as a server of another program does."""
    return socket.create_server(("", port))


# What is understood


@pytest.mark.parametrize("given", ["20000-20999", "20000:20999", " 20000 - 20999 "])
def test_a_range(given):
    assert parse_port_range(given, "--port-range") == "20000-20999"
    assert WorkerSpec(port_range=given).to_argv() == ["--port-range", "20000-20999"]


@pytest.mark.parametrize(
    "given", ["", "20000", "20999-20000", "80-90", "60000-70000", "a-b", 20000, "-1-5", "1-2-3"]
)
def test_no_range(given):
    with pytest.raises(UsageError) as caught:
        WorkerSpec(port_range=given)
    for word in ("--port-range: ", repr(given), "20000-20999", "20000:20999", "1024", "65535"):
        assert word in str(caught.value)
    with pytest.raises(UsageError, match=r"^port_range: "):
        WorkerSpec.from_keywords({"port_range": given})


def test_dask_s_configuration_is_the_default():
    with dask.config.set({"hpcdask.port-range": "30000:30100"}):
        assert WorkerSpec().port_range == "30000-30100"
        assert WorkerSpec(port_range="20000-20999").port_range == "20000-20999"
        assert WorkerSpec().to_argv() == ["--port-range", "30000-30100"]
    with (
        dask.config.set({"hpcdask.port-range": "many"}),
        pytest.raises(UsageError, match=r"^hpcdask\.port-range: 'many' is not a range"),
    ):
        WorkerSpec()
    assert WorkerSpec().port_range is None


def test_ucx_gets_it_by_its_own_variable():
    spec = WorkerSpec(port_range="20000-20999")
    assert ucx_environment(spec, {}) == {"UCX_TCP_PORT_RANGE": "20000-20999"}
    assert ucx_environment(spec, {"UCX_TCP_PORT_RANGE": "1-2"}) == {}
    assert ucx_environment(WorkerSpec(), {}) == {}


@pytest.mark.parametrize(("given", "code"), [("20000:20999", 0), ("80", 2)])
def test_submit_hands_it_to_the_runner(tmp_path, given, code):
    (tmp_path / "script.py").write_text("")
    command = ["submit", "--dry-run", "--system", "slurm", "--run", f"--port-range {given}"]
    done = CliRunner().invoke(cli.main, [*command, str(tmp_path / "script.py")])
    assert done.exit_code == code
    assert f"--port-range {given}" in done.output or "is not a range of ports" in done.output


# Which is taken


def test_taken_ports_are_left_out_until_none_is_free():
    free = free_range(3)
    with contextlib.ExitStack() as stack:
        for _ in free:
            stack.enter_context(ports.choose(bound, text(free)))
        assert not any(map(is_free, free))
        with pytest.raises(ClusterError) as caught:
            ports.choose(bound, text(free))
    for word in (f"all 3 ports of {text(free)}", socket.gethostname(), "needs 3", "--port-range"):
        assert word in str(caught.value)


def test_only_what_is_inside_of_the_block():
    free = free_range(20)
    with ports.within(text(free)):
        socks = netutil.bind_sockets(0, "127.0.0.1")
        named = netutil.bind_sockets(free[0], "127.0.0.2")
        with ports.within(None):
            assert ports.current() == text(free)
    outside = netutil.bind_sockets(0, "127.0.0.1")
    assert ports.current() is None
    assert socks[0].getsockname()[1] in free
    assert named[0].getsockname()[1] == free[0]
    assert outside[0].getsockname()[1] not in free
    for sock in (*socks, *named, *outside):
        sock.close()


def port_of(address: str) -> int:
    return int(get_address_host_port(address)[1])


def test_a_cluster_s_scheduler_and_nobody_else_in_its_process():
    free = free_range(20)
    first = free[0]

    def options(given: dict | None) -> dict:
        return read_scheduler_options(given, "none", None, local=True)

    async def start(given: dict | None) -> tuple[int, int, int]:
        made = ClusterScheduler(Scheduler, options(given), False, True, print, text(free))
        await made.start()
        async with Scheduler(port=0, dashboard_address=":0", host="127.0.0.1") as other:
            found = port_of(made.address), made.server.http_server.port, port_of(other.address)
        await made.server.close()
        return found

    scheduler, dashboard, other = asyncio.run(start(None))
    assert {scheduler, dashboard} < set(free)
    assert other not in free
    outside = free_range(40)[-1]
    named = {"port": outside, "dashboard_address": f"127.0.0.1:{first}"}
    scheduler, dashboard, _ = asyncio.run(start(named))
    assert (scheduler, dashboard) == (outside, first)


def test_worker_nanny_and_rank_0():
    free = free_range(20)

    async def start() -> set[int]:
        ports.use(text(free))
        server = Listener("nonce", None)
        found = {await server.listen("127.0.0.1", None)}
        async with Scheduler(port=0, dashboard_address=":0", host="127.0.0.1") as scheduler:
            found |= {port_of(scheduler.address), scheduler.http_server.port}
            async with Nanny(
                scheduler.address,
                nthreads=1,
                worker_class=DeviceWorker,
                port_range=text(free),
                dashboard=False,
            ) as nanny:
                found |= {port_of(nanny.address), port_of(nanny.worker_address)}
                info = scheduler.workers[nanny.worker_address].services
                found.add(info["dashboard"])
        server.close()
        return found

    found = asyncio.run(start())
    assert len(found) == 6
    assert found < set(free)
    assert ports.current() is None


def test_a_gang_meets_in_it():
    free = free_range(2)
    with gang._free_port("127.0.0.1", text(free)) as port:
        assert port in free


# Too few


def seen(rank: int, host: str) -> Inventory:
    return Inventory(rank, host, rank, 8, (0, 1), 1 << 34, ())


@pytest.mark.parametrize(("size", "fits"), [(14, False), (15, True)])
def test_a_range_that_cannot_be_enough_for_a_node(size, fits):
    spec = RunSpec(device="cpu", port_range=f"20000-{19999 + size}")
    inventories = {rank: seen(rank, "node1") for rank in range(4)}
    rank = Rank(0, 4, 0, 4, "node1", "openmpi", "1")
    fabrics = dict.fromkeys(inventories, Fabric())
    if fits:
        assert len(make_plan(spec, rank, inventories, fabrics).placements) == 4
        return
    with pytest.raises(UsageError) as caught:
        make_plan(spec, rank, inventories, fabrics)
    assert "20000-20013 has 14 ports, and 4 workers on node1 need at least 15" in str(caught.value)


def test_ucx_needs_more():
    with pytest.raises(UsageError, match="8 workers per node need at least 40"):
        ports.check_size("20000-20038", 8, ucx=True, more=0, where="per node")
    ports.check_size("20000-20039", 8, ucx=True, more=0, where="per node")
    ports.check_size(None, 8, ucx=True, more=0, where="per node")


# The doctor


def test_the_doctor_counts_free_ports():
    free = free_range(8)
    assert doctor_ports.PortFacts.read() is None
    with ports.within(text(free)), bound(free[3]):
        facts = doctor_ports.PortFacts.read()
    assert facts == doctor_ports.PortFacts(text(free), 8, 7)
    one, two = SimpleNamespace(workers=1), SimpleNamespace(workers=2)
    (good,) = doctor_ports.check(facts, one)
    (bad,) = doctor_ports.check(facts, two)
    assert (good.status, good.value) == ("ok", f"{text(free)}: 7 of 8 ports are free")
    (wide,) = doctor_ports.check(replace(facts, size=1000, free=999), one)
    enough = "Enough on this node for the scheduler and 332 workers, with ucx 199"
    assert (wide.status, wide.advice) == ("ok", enough)
    assert (bad.status, "need 9" in bad.advice) == ("error", True)


def test_the_doctor_connects_to_the_others():
    free = free_range(20)
    with ports.within(text(free)):
        listening = doctor_ports.Listening.start("127.0.0.1")
    assert listening.port in free
    with socket.create_server(("127.0.0.1", 0)) as server:
        closed = doctor_ports.Listening("127.0.0.1", server.getsockname()[1])
    found = asyncio.run(doctor_ports.connect({"a": listening, "b": closed}))
    assert found == {"b": "Connection refused"}


def test_what_the_doctor_says_of_the_nodes():
    rank = Rank(0, 2, 0, 1, "n1", "srun", "1")
    launch = Launch(rank, 60, hosts={0: "n1", 1: "n2"}, reports={0: {}, 1: {}})
    launch.reached.update(n1={}, n2={"n1": "Connection refused"})
    with ports.within("20000-20999"):
        (bad,) = [one for one in check_launch(launch) if one.topic == "port range"]
        launch.reached["n2"] = {}
        (good,) = [one for one in check_launch(launch) if one.topic == "port range"]
    assert bad.value == "n2 cannot reach n1 in 20000-20999: Connection refused"
    assert bad.status == "error"
    assert (good.status, good.value) == ("ok", "20000-20999: 2 nodes reach each other in it")


def test_a_batch_script_has_the_range_that_is_configured_where_it_is_made():
    def submit(*words: str) -> str:
        command = ["submit", "--dry-run", "--system", "slurm", *words, "-m", "timeit"]
        return CliRunner().invoke(cli.main, command).output

    assert "--port-range" not in submit()
    with dask.config.set({"hpcdask.port-range": "20000:20099"}):
        assert "-m hpcdask.run --port-range 20000-20099 -m timeit" in submit()
        assert "-m hpcdask.run --port-range=30000-30099 -m" in submit(
            "--run", "--port-range=30000-30099"
        )
    with dask.config.set({"hpcdask.port-range": "20000-20013"}):
        assert "has 14 ports, and 4 workers on the first node need" in submit("--gpus-per-node=4")


def test_a_range_that_is_configured_is_called_by_its_source(tmp_path, monkeypatch):
    def refused(port_range: str) -> str:
        with pytest.raises(UsageError) as error:
            ports.check_size(port_range, 2, ucx=False, more=0, where="here", option="port_range")
        return str(error.value)

    (tmp_path / "site.yaml").write_text("hpcdask: {port-range: '20000:20001'}")
    monkeypatch.setattr(dask.config, "paths", [str(tmp_path)])
    with dask.config.set({"hpcdask.port-range": "20000:20001"}):
        assert refused("20000-20001").startswith(f"hpcdask.port-range ({tmp_path}/site.yaml): 20")
        assert refused("30000-30001").startswith("port_range: 30000-30001 has 2 ports")
        monkeypatch.setenv("DASK_HPCDASK__PORT_RANGE", "20000-20001")
        said = refused("20000-20001")
        assert said.startswith("hpcdask.port-range (variable DASK_HPCDASK__PORT_RANGE): ")
    monkeypatch.delenv("DASK_HPCDASK__PORT_RANGE")
    with dask.config.set({"hpcdask.port-range": "40000-40001"}):
        monkeypatch.setattr(dask.config, "paths", [])
        assert refused("40000-40001").startswith("hpcdask.port-range (Dask's configuration): ")
