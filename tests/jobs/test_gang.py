"""Gangs: all ranks or none, and no fault of one leaves anything that hangs."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib.util
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import numpy as np
import psutil
import pytest
from distributed import Client, LocalCluster

import hpcdask
from clock import stretched
from hpcdask.client import gang_scheduler
from hpcdask.client.gang import RankContext
from hpcdask.clusters import retire
from hpcdask.clusters.scaling import JobAdaptive
from hpcdask.errors import GangError, UsageError
from hpcdask.logs import natural
from launching import wait_for

cloudpickle.register_pickle_by_value(sys.modules[__name__])
RING = Path(__file__).parents[2] / "examples" / "ring_allreduce.py"
SIZE = 3
LONG_S = 60
#: What one rank may do, and what the error then says.
FAULTS = {
    "raise": "ValueError",
    "exit": "its worker died",
    "kill": "its worker died",
}
#: How a call may refuse to end: in Python, in C, and in C with Python's lock held.
HANGS = ("sleep", "pause", "locked")


def ring() -> Callable:
    spec = importlib.util.spec_from_file_location("ring_allreduce", RING)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["ring_allreduce"] = module
    cloudpickle.register_pickle_by_value(module)
    return module.all_reduce


def misbehave(kind: str) -> None:
    if kind == "raise":
        raise ValueError("so it goes")
    if kind == "exit":
        os._exit(3)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while kind == "sleep":
        time.sleep(0.1)
    if kind == "pause":
        ctypes.CDLL(None).pause()
    if kind == "locked":
        ctypes.PyDLL(None).pause()


def act(context: RankContext, kind: str) -> int:
    misbehave(kind)
    return context.rank


def describe(context: RankContext, item: object = None, **shared: object) -> tuple:
    names = [name for name in os.environ if name.endswith(("SOCKET_IFNAME", "RANK", "SIZE"))]
    names += ["MASTER_ADDR", "MASTER_PORT"]
    return context, {name: os.environ[name] for name in names}, item, shared, os.getpid()


def hold(context: RankContext, folder: str) -> str:
    """Say that it runs, and wait for the word to end."""
    Path(folder, f"runs-{os.getpid()}").touch()
    deadline = time.monotonic() + LONG_S
    while not Path(folder, "end").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return context.rank


def lose_peer(context: RankContext, kind: str) -> None:
    """Fail rank 1, whose connections close before its error is known, as those of NCCL do."""
    address = context.master_addr, context.master_port
    if context.rank == 0:
        with socket.create_server(address) as server, server.accept()[0] as peer:
            if not peer.recv(1):
                raise ConnectionError("connection closed by peer")
    deadline = time.monotonic() + LONG_S
    while time.monotonic() < deadline:
        with contextlib.suppress(ConnectionRefusedError), socket.create_connection(address):
            break
        time.sleep(0.02)
    time.sleep(0.3)
    misbehave(kind)


def make(tmp_path: Path, **keywords) -> hpcdask.LocalCUDAJobCluster:
    options = {"device": "cpu", "cores": 1, "processes": 1, "memory": "512MiB"}
    options |= {"poll_interval": 0.3, "walltime": "01:00:00"}
    return hpcdask.LocalCUDAJobCluster(
        **options, shared_temp_directory=str(tmp_path / "clusters"), **keywords
    )


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple]:
    with make(tmp_path_factory.mktemp("gang")) as cluster, cluster.get_client() as client:
        cluster.scale(SIZE)
        client.wait_for_workers(SIZE, timeout=180)
        yield cluster, client


@pytest.fixture
def client(started: tuple) -> Iterator[Client]:
    """A client of a cluster of three; afterwards nothing is left, and the cluster computes."""
    client = started[1]
    client.wait_for_workers(SIZE, timeout=180)
    yield client
    nothing_left(client)


@pytest.fixture
def cluster(started: tuple, client: Client) -> hpcdask.LocalCUDAJobCluster:
    return started[0]


def nothing_left(client: Client) -> None:
    def gangs(dask_scheduler) -> list:
        found = [key for key in dask_scheduler.tasks if "gang" in str(key)]
        return found + gang_scheduler.describe(dask_scheduler)

    def is_busy(dask_worker) -> bool:
        return bool({"RANK", "MASTER_PORT"} & {*os.environ} or dask_worker.state.executing)

    def listening() -> int:
        return sum(one.status == "LISTEN" for one in psutil.Process().net_connections())

    wait_for(lambda: not client.run_on_scheduler(gangs), LONG_S, "the gangs to be gone")
    client.wait_for_workers(SIZE, timeout=180)
    numbers = client.map(lambda number: number + 1, range(10), pure=False)
    assert client.gather(numbers) == list(range(1, 11))
    del numbers
    wait_for(lambda: not any(client.run(is_busy).values()), LONG_S, "the workers to be free")
    assert len(set(client.run(listening).values())) == 1


def wait_until_runs(folder: Path, count: int) -> None:
    wait_for(lambda: len(list(folder.glob("runs-*"))) == count, LONG_S, f"{count} to run")


# What the ranks are told, and where they are


def test_a_ring(client: Client):
    arrays = [np.arange(1000) * 10**rank for rank in range(SIZE)]
    totals = hpcdask.gang(ring(), arrays, client=client, timeout=LONG_S)
    assert all(np.array_equal(total, np.arange(1000) * 111) for total in totals)


def test_what_a_rank_is_told(client: Client):
    found = hpcdask.gang(describe, ["abc"] * SIZE, client=client, shared={"more": [1]})
    assert len({pid for *_, pid in found}) == SIZE
    for rank, (context, variables, item, shared, _) in enumerate(found):
        assert (context.rank, context.world_size) == (rank, SIZE)
        assert (context.local_rank, context.local_world_size) == (rank, SIZE)
        assert (context.master_addr, context.device) == ("127.0.0.1", "cpu")
        expected = {"RANK": rank, "WORLD_SIZE": SIZE, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": SIZE}
        expected |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": context.master_port}
        expected |= {"NCCL_SOCKET_IFNAME": "=lo", "GLOO_SOCKET_IFNAME": "lo"}
        assert variables.items() >= {name: str(one) for name, one in expected.items()}.items()
        assert (item, shared) == ("abc", {"more": [1]})
    with socket.create_server(("127.0.0.1", context.master_port)):
        pass


def test_ranks_are_in_the_order_of_the_workers_names_also_of_part_of_a_node(client: Client):
    names = client.run(lambda dask_worker: (str(dask_worker.name), os.getpid()))
    pids = [pid for _, pid in sorted(names.values(), key=lambda named: natural(named[0]))]
    assert hpcdask.gang(lambda context: os.getpid(), client=client) == pids
    found = hpcdask.gang(describe, client=client, size=2)
    told = [(one.rank, one.local_rank, one.local_world_size) for one, *_ in found]
    assert told == [(0, 0, 2), (1, 1, 2)]
    assert [variables["LOCAL_WORLD_SIZE"] for _, variables, *_ in found] == ["2", "2"]


def test_a_rank_goes_where_its_data_are(client: Client):
    workers = sorted(client.nthreads())
    order = [workers[2], workers[0], workers[1]]
    parts = [client.submit(np.ones, 10, workers=[one], pure=False) for one in order]
    found = hpcdask.gang(describe, parts, client=client, shared={"all": parts[0]})
    pids = client.run(os.getpid)
    assert [pid for *_, pid in found] == [pids[one] for one in order]
    assert all(item.sum() == shared["all"].sum() == 10 for _, _, item, shared, _ in found)
    assert {len(holders) for holders in client.who_has(parts[1:]).values()} == {1}


def test_a_function_that_workers_cannot_import(client: Client, monkeypatch):
    """distributed's own message of it ends the workers, one after the other."""
    module = types.ModuleType("not_on_workers")
    exec("def function(context): pass", vars(module))
    monkeypatch.setitem(sys.modules, "not_on_workers", module)
    with pytest.raises(GangError, match="No module named 'not_on_workers'"):
        hpcdask.gang(module.function, client=client)


def test_data_that_fail(client: Client):
    parts = [client.submit(lambda: 1), client.submit(lambda: 1 / 0)]
    with pytest.raises(GangError, match=r"rank 1 of 2 .*ZeroDivisionError") as caught:
        hpcdask.gang(describe, parts, client=client)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize(
    ("arguments", "keywords", "message"),
    [
        (([1, 2], [1]), {}, "these have 1, 2"),
        (([1, 2],), {"size": 3}, "these have 2, 3"),
        (([],), {}, "these have 0"),
        ((5,), {}, "not int"),
        (("ab",), {}, "not str"),
        (([1],), {"timeout": None}, "timeout: it must be a time"),
        ((range(SIZE + 1),), {}, "a gang of 4 needs as many workers, and the cluster has 3"),
    ],
)
def test_bad_arguments(client: Client, arguments, keywords, message):
    with pytest.raises(UsageError, match=message):
        hpcdask.gang(describe, *arguments, client=client, **keywords)


# Several at once


def test_two_at_once_and_a_third_that_waits(client: Client, tmp_path: Path):
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor() as pool:

        def start(folder: Path, size: int):
            return pool.submit(hpcdask.gang, hold, [str(folder)] * size, client=client)

        first, second = start(folders[0], 1), start(folders[1], 2)
        wait_until_runs(folders[0], 1)
        wait_until_runs(folders[1], 2)
        third = start(folders[2], 2)
        (folders[0] / "end").touch()
        assert first.result(LONG_S) == [0]
        # it has one worker of two, and does not begin
        assert client.submit(lambda: 5, pure=False).result(timeout=LONG_S) == 5
        assert not list(folders[2].iterdir())
        (folders[1] / "end").touch()
        assert second.result(LONG_S) == [0, 1]
        wait_until_runs(folders[2], 2)
        (folders[2] / "end").touch()
        assert third.result(LONG_S) == [0, 1]


@pytest.mark.long
def test_workers_of_several_threads(tmp_path: Path):
    """Other Dask tasks run beside a call, and do not see its variables."""
    with (
        LocalCluster(
            n_workers=2,
            threads_per_worker=2,
            host="127.0.0.1",
            dashboard_address=":0",
            local_directory=str(tmp_path),
        ) as cluster,
        Client(cluster) as client,
        ThreadPoolExecutor() as pool,
    ):
        gang = pool.submit(hpcdask.gang, hold, [str(tmp_path)] * 2, client=client)
        wait_until_runs(tmp_path, 2)
        beside = client.map(lambda number: os.environ.get("RANK", number), range(8), pure=False)
        assert client.gather(beside) == list(range(8))
        (tmp_path / "end").touch()
        assert gang.result(LONG_S) == [0, 1]


@pytest.mark.long
def test_asynchronous(started: tuple, client: Client):
    async def run() -> None:
        address, security = started[0].scheduler_address, started[0].security
        async with Client(address, security=security, asynchronous=True) as own:
            several = [hpcdask.gang(act, ["fine"] * n, client=own) for n in (1, 2, 3)]
            assert await asyncio.gather(*several) == [[0], [0, 1], [0, 1, 2]]
            with pytest.raises(GangError, match="rank 1 of 2"):
                await hpcdask.gang(act, ["sleep", "raise"], client=own, grace=1)
            for _ in range(20):  # wherever it is just then
                cancelled = asyncio.ensure_future(hpcdask.gang(act, ["fine"] * SIZE, client=own))
                await asyncio.sleep(random.uniform(0, 0.2))
                cancelled.cancel()
                await asyncio.wait([cancelled])
            hanging = asyncio.ensure_future(
                hpcdask.gang(act, ["sleep"] * SIZE, client=own, grace=1)
            )
            await asyncio.sleep(1)
            hanging.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hanging

    asyncio.run(asyncio.wait_for(run(), 2 * LONG_S))


# Faults


@pytest.mark.parametrize(("fault", "hang"), list(zip(FAULTS, HANGS, strict=True)))
def test_a_fault_ends_all(client: Client, fault: str, hang: str, capfd):
    kinds = ["fine", fault, hang]
    with pytest.raises(GangError, match=FAULTS[fault]) as caught:
        hpcdask.gang(act, kinds, client=client, timeout=5 * LONG_S, grace=1)
    error = caught.value
    assert error.rank == 1
    assert error.host == socket.gethostname()
    assert f"rank 1 of 3 failed on worker {error.worker}, host {error.host}" in str(error)
    assert isinstance(error.__cause__, ValueError) == (fault == "raise")
    told = [line for line in capfd.readouterr().err.splitlines() if "gang: rank" in line]
    assert len(told) == 1
    assert "gang: rank 2 did not end within 1 s" in told[0]
    # at once, though workers are just being restarted
    assert hpcdask.gang(act, ["fine"] * SIZE, client=client, timeout=LONG_S) == [0, 1, 2]


@pytest.mark.parametrize("fault", ["raise", "kill"])
def test_the_rank_that_failed_is_named_not_its_peer(client: Client, fault: str):
    with pytest.raises(GangError, match=FAULTS[fault]) as caught:
        hpcdask.gang(lose_peer, ["fine", fault], client=client, grace=1)
    assert caught.value.rank == 1


@pytest.mark.long
def test_a_deadline(client: Client):
    timeout = stretched(3)
    told = rf"not done within {timeout} s: 1 rank still ran: 1"
    with pytest.raises(GangError, match=told) as caught:
        hpcdask.gang(act, ["fine", "locked"], client=client, timeout=timeout, grace=1)
    assert caught.value.rank == 1


def test_a_deadline_before_it_starts(client: Client, tmp_path: Path):
    busy = client.submit(lambda: hold(RankContext(7, *[0] * 7), str(tmp_path)), pure=False)
    wait_until_runs(tmp_path, 1)
    with pytest.raises(GangError, match="were not all there and free"):
        hpcdask.gang(act, ["fine"] * SIZE, client=client, timeout=2)
    (tmp_path / "end").touch()
    assert busy.result(timeout=LONG_S) == 7


def test_ctrl_c(client: Client, tmp_path: Path):
    def interrupt() -> None:
        wait_until_runs(tmp_path, SIZE)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    # dask-jobqueue, where another test has imported it, ends the process
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            hpcdask.gang(hold, [str(tmp_path)] * SIZE, client=client, grace=1)
    finally:
        signal.signal(signal.SIGINT, handler)
    thread.join()


LEAVES = """
import os, sys, time
import cloudpickle
from distributed import Client, Security
import hpcdask
if __name__ == "__main__":
    address, security = cloudpickle.load(open(sys.argv[1], "rb"))
    def hang(context, folder):
        open(f"{folder}/runs-{os.getpid()}", "w").close()
        while True:
            time.sleep(0.1)
    hpcdask.gang(hang, sys.argv[2:] * 2, client=Client(address, security=security))
"""


def test_a_program_that_dies_leaves_no_gang(started: tuple, client: Client, tmp_path: Path):
    """Its calls run on, and there is nobody left to end them but the scheduler."""
    access = tmp_path / "access"
    access.write_bytes(cloudpickle.dumps((started[0].scheduler_address, started[0].security)))
    before = set(client.run(os.getpid).values())
    program = subprocess.Popen([sys.executable, "-c", LEAVES, str(access), str(tmp_path)])
    wait_until_runs(tmp_path, 2)
    program.kill()
    program.wait()

    def left() -> set[int]:  # those that are being restarted do not answer
        return before & set(client.run(os.getpid, on_error="ignore").values())

    wait_for(lambda: len(left()) == 1, LONG_S, "restarts")


# The cluster's own reasons to end workers


def test_a_worker_that_leaves_waits_for_it(cluster, client: Client, tmp_path: Path):
    async def leave(name: str, deadline_s: float) -> frozenset[str]:
        return await retire.retire(cluster.scheduler, [name], deadline_s=deadline_s)

    with ThreadPoolExecutor() as pool:
        gang = pool.submit(hpcdask.gang, hold, [str(tmp_path)] * SIZE, client=client)
        wait_until_runs(tmp_path, SIZE)
        name = sorted(str(ws.name) for ws in cluster.scheduler.workers.values())[1]
        assert not cluster.sync(leave, name, 1.0)
        (tmp_path / "end").touch()
        assert gang.result(LONG_S) == [0, 1, 2]


@pytest.mark.long
def test_the_walltime_ends_it_with_a_word(cluster, client: Client, tmp_path: Path):
    async def end() -> None:
        names = [min(str(ws.name) for ws in cluster.scheduler.workers.values())]
        await retire.force_out(cluster.scheduler, names, expected=False)

    with ThreadPoolExecutor() as pool:
        gang = pool.submit(hpcdask.gang, hold, [str(tmp_path)] * 2, client=client, grace=1)
        wait_until_runs(tmp_path, 2)
        cluster.sync(end)
        with pytest.raises(GangError, match=r"rank 0 .* its worker's job reached its walltime"):
            gang.result(LONG_S)


def test_adaptive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    looks: list[object] = []
    needed = JobAdaptive.needed

    def look(self: JobAdaptive) -> dict[str, int]:
        looks.append(self)
        return needed(self)

    monkeypatch.setattr(JobAdaptive, "needed", look)
    with make(tmp_path) as cluster, cluster.get_client() as client, ThreadPoolExecutor() as pool:
        cluster.adapt(minimum=0, maximum=2, interval="200ms", wait_count=1)
        with pytest.raises(UsageError, match="a gang of 3 needs as many workers"):
            hpcdask.gang(act, ["fine"] * 3, client=client)
        gang = pool.submit(hpcdask.gang, hold, [str(tmp_path)] * 2, client=client)
        wait_until_runs(tmp_path, 2)
        seen = len(looks)
        wait_for(lambda: len(looks) > seen + 3, LONG_S, "looks that find little to do")
        assert len(client.nthreads()) == 2
        (tmp_path / "end").touch()
        assert gang.result(LONG_S) == [0, 1]
        wait_for(lambda: not client.nthreads(), LONG_S, "the workers to leave")
