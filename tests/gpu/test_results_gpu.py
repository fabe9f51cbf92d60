"""Arrays on real GPUs that a program gathers."""

from __future__ import annotations

import json

import pytest

from gpu_launching import launch
from hpcdask.gpu.devices import Gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

PROGRAM = """
import json
from cuda.bindings import driver
from distributed import Client
from hpcdask.security import process_memory

COUNTS = [0, 1, 1_000, 20_000_000]
real, nbytes = process_memory.copy_arrays, []

def copy(handle, sizes):
    nbytes.extend(sizes)
    return real(handle, sizes)

def make(count):
    import cupy
    cupy.random.random_sample((4000, 4000)) @ cupy.random.random_sample((4000, 4000))
    return cupy.arange(count)[::-1]

def fill():
    from hpcdask.security import process_memory

    def refuse(buffers):
        raise MemoryError

    process_memory.lend_arrays = refuse

def gather():
    where = {worker: client.map(make, COUNTS, workers=[worker], pure=False)
             for worker in client.nthreads()}
    arrays = [array for found in client.gather(where).values() for array in found]
    assert {type(array).__module__ for array in arrays} == {"cupy"}
    assert all(bool((array == make(len(array))).all()) for array in arrays)
    told = {"counts": sorted(map(len, arrays)), "nbytes": sorted(nbytes)}
    nbytes.clear()
    return told

if __name__ == "__main__":
    process_memory.copy_arrays = copy
    client = Client()
    numbers = client.gather(client.map(abs, range(8)))
    driver.cuInit(0)
    has_context = bool(driver.cuDevicePrimaryCtxGetState(0)[2])
    with_room = gather()
    client.run(fill)
    print(json.dumps({"context": has_context, "with room": with_room, "full": gather()}))
"""


def test_a_program_gathers_arrays_from_device_to_device(gpus: list[Gpu]) -> None:
    """Through host memory where the worker's device has no room for a copy (a stand-in)."""
    done = launch(len(gpus), program=PROGRAM)
    told = json.loads(done.out.splitlines()[-1])
    counts = sorted([0, 1, 1_000, 20_000_000] * len(gpus))
    copied = [8 * count for count in counts]
    assert told == {
        "context": False,
        "with room": {"counts": counts, "nbytes": copied},
        "full": {"counts": counts, "nbytes": []},
    }
