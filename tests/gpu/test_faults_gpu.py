"""GPU workers that die after they have exchanged data come back; what is said of NVLink is true."""

from __future__ import annotations

import json

import pytest

from gpu_launching import launch, sharing, workers_on
from hpcdask.gpu.devices import Gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

FAULTS = """
import json, os, signal, sys, time
import dask.array as da, numpy as np
from distributed import Client, wait
from hpcdask.bench.cluster import wait_until_warm

SIDE = 4000

def block(number):
    import cupy
    return cupy.full((SIDE, SIDE), float(number))

def mean(x):
    return float(x.mean())

def exchange(client):
    '''The mean of an array from each worker, on another one: checked.'''
    workers = sorted(client.nthreads())
    made = [client.submit(block, number, workers=[worker], pure=False)
            for number, worker in enumerate(workers)]
    means = [client.submit(mean, made[number - 1], workers=[worker], pure=False)
             for number, worker in enumerate(workers)]
    return client.gather(means) == [float((n - 1) % len(workers)) for n in range(len(workers))]

def free_memory(client):
    '''Bytes free on each GPU, by worker name.'''
    def ask(dask_worker):
        from cuda.bindings import driver
        return dask_worker.name, driver.cuMemGetInfo()[1]
    return dict(client.run(ask).values())

def back(client, workers, gone):
    '''Wait until as many workers are there, none of those gone.'''
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = client.run(os.getpid, on_error="ignore") if client.nthreads() else {}
        pids = set(found.values())
        if len(pids) == workers and not pids & gone:
            return
        time.sleep(0.05)
    sys.exit("the workers did not come back")

def write_past_the_end():
    import cupy
    kernel = cupy.RawKernel('extern "C" __global__ void k(char *p) { p[1ull << 50] = 1; }', "k")
    kernel((1,), (1,), (cupy.zeros(1, "uint8"),))
    cupy.cuda.runtime.deviceSynchronize()

client = Client()
count = int(sys.argv[1])
client.wait_for_workers(count)
result = {"right": [], "free": [], "mapped": []}

def note():
    wait_until_warm(client)
    result["right"].append(exchange(client))
    links = {event["name"]: event["links"] for _, event in client.get_events("hpcdask-warm")}
    result["mapped"].append(all(link["cuda_ipc"] for found in links.values() for link in found))
    result["free"].append(free_memory(client))

note()
for turn in range(3):
    pids = sorted((name, pid) for name, pid in client.run(
        lambda dask_worker: (dask_worker.name, os.getpid())).values())
    victim = pids[turn % count][1]
    os.kill(victim, signal.SIGKILL)
    back(client, count, {victim})
    note()

pids = set(client.run(os.getpid).values())
client.restart()
back(client, count, pids)
note()

for turn in range(2):
    address, pid = list(client.run(os.getpid).items())[turn]
    kept = client.persist(da.ones((100, 100), chunks=50).map_blocks(
        lambda b: __import__("cupy").asarray(b), meta=np.empty((0, 0))))
    wait(kept)
    future = client.submit(write_past_the_end, workers=[address], pure=False)
    result.setdefault("errors", []).append(str(future.exception()))
    back(client, count, {pid})
    result.setdefault("kept", []).append(float(kept.map_blocks(
        lambda b: b.get(), meta=np.empty((0, 0))).sum().compute()))
    note()
print(json.dumps(result))
"""


def test_workers_that_are_killed_restarted_or_lose_their_context_come_back(gpus: list[Gpu]) -> None:
    count = workers_on(gpus)
    options = ["--protocol", "ucx", *sharing(count, gpus)]
    done = launch(count, *options, program=FAULTS, words=[str(count)], timeout=280)
    print(done.err)
    found = json.loads(done.out.splitlines()[-1])
    assert found["right"] == [True] * 7
    assert found["mapped"] == [True] * 7, "data did not go over NVLink again"
    first = found["free"][0]
    for later in found["free"][1:]:
        for name, free in later.items():
            assert free > first[name] - 2**30, "memory of a dead worker is still held"
    assert all("llegal" in error for error in found["errors"]), found["errors"]
    assert found["kept"] == [10000.0] * 2
    assert done.err.count("left the GPU's context unusable (CUDA_ERROR_ILLEGAL_ADDRESS)") == 2
    assert "Traceback (most recent call last)" not in done.err
    assert "[error" not in done.err  # of RMM
    assert "does not start again" not in done.err
    assert "pool begins with" not in done.err


BUSY = """
import time
import numpy as np
from distributed import Client
from hpcdask.bench.cluster import wait_until_warm

def keep_busy(seconds):
    import cupy
    end = time.monotonic() + seconds
    x = cupy.ones((8192, 8192), "float32")
    host = np.ones(2**27, "uint8")
    while time.monotonic() < end:
        for _ in range(20):
            x @ x
        cupy.asarray(host)
        cupy.cuda.runtime.deviceSynchronize()

client = Client()
busy = [client.submit(keep_busy, 6, workers=[worker], pure=False) for worker in client.nthreads()]
wait_until_warm(client)
client.gather(busy)
"""


def test_no_false_alarm_about_nvlink_under_load(gpus: list[Gpu]) -> None:
    count = workers_on(gpus)
    done = launch(count, "--protocol", "ucx", *sharing(count, gpus), program=BUSY)
    assert "CUDA IPC is active" in done.err
    assert "not in use" not in done.err
