"""GPU workers that die after they have exchanged data come back; what is said of NVLink is true."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_launching import launch, nvlink_joins, sharing
from hpcdask.gpu.devices import Gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

SHARED = """
import json, os, signal, sys, time
import dask.array as da, numpy as np
from distributed import Client, wait

SIDE = 4000

def block(number):
    import cupy
    return cupy.full((SIDE, SIDE), float(number))

def mean(x):
    return float(x.mean())

def exchange(client):
    '''The mean of an array from each worker, on another one: checked.'''
    workers = sorted(client.scheduler_info(n_workers=-1)["workers"])
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

def mapped(client):
    '''Whether each worker has memory of a living one mapped, or is mapped by one.'''
    def ask(dask_worker):
        return [os.getpid(), [pid for pid, _ in dask_worker._mappings.processes()]]
    found = list(client.run(ask).values())
    return all(any(pid in theirs or other in mine for other, theirs in found if other != pid)
               for pid, mine in found)

def back(client, workers, gone):
    '''Seconds until as many workers are there, none of those gone.'''
    start = time.monotonic()
    while time.monotonic() - start < 60:
        found = client.run(os.getpid, on_error="ignore") if client.nthreads() else {}
        pids = set(found.values())
        if len(pids) == workers and not pids & gone:
            return time.monotonic() - start
        time.sleep(0.05)
    sys.exit("the workers did not come back")

client = Client()
count = int(sys.argv[1])
client.wait_for_workers(count)
result = {"right": [], "seconds": [], "free": [], "mapped": []}

def note():
    result["right"].append(exchange(client))
    result["mapped"].append(mapped(client))
    result["free"].append(free_memory(client))

note()
"""

KILLS = """
for turn in range(5):
    pids = sorted((name, pid) for name, pid in client.run(
        lambda dask_worker: (dask_worker.name, os.getpid())).values())
    victim = pids[turn % count][1]
    os.kill(victim, signal.SIGKILL)
    result["seconds"].append(back(client, count, {victim}))
    note()
print(json.dumps(result))
"""

RESTARTS = """
for turn in range(2):
    pids = set(client.run(os.getpid).values())
    client.restart()
    result["seconds"].append(back(client, count, pids))
    note()
print(json.dumps(result))
"""

ILLEGAL = """
def write_past_the_end():
    import cupy
    kernel = cupy.RawKernel('extern "C" __global__ void k(char *p) { p[1ull << 50] = 1; }', "k")
    kernel((1,), (1,), (cupy.zeros(1, "uint8"),))
    cupy.cuda.runtime.deviceSynchronize()

for turn in range(2):
    address, pid = list(client.run(os.getpid).items())[turn]
    kept = client.persist(da.ones((100, 100), chunks=50).map_blocks(
        lambda b: __import__("cupy").asarray(b), meta=np.empty((0, 0))))
    wait(kept)
    future = client.submit(write_past_the_end, workers=[address], pure=False)
    result.setdefault("errors", []).append(str(future.exception()))
    result["seconds"].append(back(client, count, {pid}))
    result.setdefault("kept", []).append(float(kept.map_blocks(
        lambda b: b.get(), meta=np.empty((0, 0))).sum().compute()))
    note()
print(json.dumps(result))
"""


def workers_on(gpus: list[Gpu]) -> int:
    """How many to start: one per GPU, or two that share the only one, and map each other, too."""
    if len(gpus) > 1 and not nvlink_joins(gpus):
        pytest.skip("needs GPUs that NVLink joins")
    return max(2, len(gpus))


def run(tmp_path: Path, gpus: list[Gpu], program: str) -> tuple[dict, str]:
    count = workers_on(gpus)
    script = tmp_path / "faults.py"
    script.write_text(SHARED + program)
    options = ["--protocol", "ucx", *sharing(count, gpus)]
    done = launch(count, *options, str(script), str(count), timeout=240)
    assert done.returncode == 0, done.stderr
    print(done.stderr)
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def check(found: dict, err: str) -> None:
    assert all(found["right"])
    assert all(found["mapped"]), "data did not go over NVLink again"
    assert max(found["seconds"]) < 10
    first = found["free"][0]
    for later in found["free"][1:]:
        for name, free in later.items():
            assert free > first[name] - 2**30, "memory of a dead worker is still held"
    assert "Traceback (most recent call last)" not in err
    assert "[error" not in err  # of RMM
    assert "does not start again" not in err
    assert "pool begins with" not in err


def test_a_worker_that_is_killed_comes_back(gpus: list[Gpu], tmp_path: Path) -> None:
    found, err = run(tmp_path, gpus, KILLS)
    assert len(found["seconds"]) == 5
    check(found, err)


def test_workers_come_back_after_restarts(gpus: list[Gpu], tmp_path: Path) -> None:
    found, err = run(tmp_path, gpus, RESTARTS)
    check(found, err)


def test_a_worker_whose_context_is_lost_is_replaced(gpus: list[Gpu], tmp_path: Path) -> None:
    found, err = run(tmp_path, gpus, ILLEGAL)
    assert all("llegal" in error for error in found["errors"]), found["errors"]
    assert found["kept"] == [10000.0] * 2
    assert err.count("left the GPU's context unusable (CUDA_ERROR_ILLEGAL_ADDRESS)") == 2
    check(found, err)


BUSY = """
import sys, time
import dask.array as da, numpy as np
from distributed import Client, get_client, worker_client

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
count = int(sys.argv[1])
busy = [client.submit(keep_busy, 6, workers=[worker], pure=False) for worker in client.nthreads()]
from hpcdask.bench.cluster import wait_until_warm
wait_until_warm(client)
client.gather(busy)
"""


def test_no_false_alarm_about_nvlink_under_load(gpus: list[Gpu], tmp_path: Path) -> None:
    count = workers_on(gpus)
    script = tmp_path / "busy.py"
    script.write_text(BUSY)
    done = launch(count, "--protocol", "ucx", *sharing(count, gpus), str(script), str(count))
    assert done.returncode == 0, done.stderr
    assert "CUDA IPC is active" in done.stderr
    assert "not in use" not in done.stderr
