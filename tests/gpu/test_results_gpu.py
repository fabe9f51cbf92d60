"""Arrays on real GPUs that a program gathers."""

from __future__ import annotations

import json

import pytest

from gpu_launching import launch
from hpcdask.gpu.devices import Gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

PROGRAM = """
import json, sys
from cuda.bindings import driver
from distributed import Client
from hpcdask.security import device_memory

real, nbytes = device_memory.copy, []

def copy(handle, sizes):
    nbytes.extend(sizes)
    return real(handle, sizes)

def refuse(buffers):
    raise MemoryError

def fill():
    from hpcdask.security import device_memory
    device_memory.lend = refuse

def make(count):
    import cupy
    cupy.random.random_sample((4000, 4000)) @ cupy.random.random_sample((4000, 4000))
    return cupy.arange(count)[::-1]

if __name__ == "__main__":
    device_memory.copy = copy
    client = Client()
    if sys.argv[1] == "full":
        client.run(fill)
    numbers = client.gather(client.map(abs, range(8)))
    driver.cuInit(0)
    has_context = bool(driver.cuDevicePrimaryCtxGetState(0)[2])
    counts = [0, 1, 1_000, 20_000_000]
    where = {worker: client.map(make, counts, workers=[worker], pure=False)
             for worker in client.nthreads()}
    found = client.gather(where)
    print(json.dumps({
        "context": has_context,
        "nbytes": sorted(nbytes),
        "types": sorted({type(array).__module__ for arrays in found.values() for array in arrays}),
        "right": [bool((array == make(count)).all()) and len(array) == count
                  for arrays in found.values() for array, count in zip(arrays, counts)],
    }))
"""


@pytest.mark.parametrize(
    ("option", "device"),
    [("--rmm-pool-size=0.3", ""), ("--rmm-async", ""), ("--rmm-pool-size=0.3", "full")],
)
def test_a_program_gathers_arrays_from_device_to_device(
    gpus: list[Gpu], option: str, device: str
) -> None:
    """Through host memory where the worker's device has no room for a copy (a stand-in)."""
    done = launch(len(gpus), option, program=PROGRAM, words=[device or "has room"])
    told = json.loads(done.out.splitlines()[-1])
    assert not told["context"]
    assert told["types"] == ["cupy"]
    assert told["right"] == [True] * 4 * len(gpus)
    copied = sorted(8 * count for count in (0, 1, 1_000, 20_000_000) for _ in gpus)
    assert told["nbytes"] == ([] if device else copied)
