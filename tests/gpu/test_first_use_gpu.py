"""What is loaded on a real GPU before the first Dask task, and that it holds no memory."""

from __future__ import annotations

import json

import pytest

from gpu_launching import launch
from hpcdask.gpu.devices import Gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

#: Kernels and libraries stay loaded; handles of cuBLAS and cuSOLVER, which have 160 MB, do not.
MOST_NBYTES = 128 << 20
PROGRAM = """
import json, time
import dask
from distributed import Client
from hpcdask.bench.cluster import wait_until_warm

def uses_threads():
    import threading
    return any(one.name == "first-use" for one in threading.enumerate())

def beside_the_pool():
    import cupy
    from hpcdask.gpu.context import USES, FirstUse
    cupy.zeros(8)
    before, first_use = cupy.cuda.runtime.memGetInfo()[0], FirstUse()
    first_use.start()
    first_use.join(200)
    cupy.get_default_memory_pool().free_all_blocks()
    held = before - cupy.cuda.runtime.memGetInfo()[0]
    random = cupy.random.RandomState(1)
    for use in USES:  # raises what the thread keeps to itself
        use(cupy, random, random.random_sample((64, 64)))
    return held

client = Client()
wait_until_warm(client)  # the first use comes then
while any(client.run(uses_threads).values()):
    time.sleep(0.1)
print(json.dumps({
    "held": max(client.run(beside_the_pool).values()),
    "chunks": dask.config.get("array.chunk-size"),
    "method": dask.config.get("array.rechunk.method"),
}))
"""


def test_workers_load_before_the_first_task_and_give_memory_back(gpus: list[Gpu]) -> None:
    found = json.loads(launch(1, "--rmm-pool-size", "0", program=PROGRAM, timeout=200).out)
    print(found)
    assert found["held"] < MOST_NBYTES
    assert (found["chunks"], found["method"]) == ("512MiB", "tasks")
