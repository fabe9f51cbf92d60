"""Device memory on a real GPU: one pool for all, spilling, a worker that outlives a full device.

Each test runs a program with one worker, on the first GPU of the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpu_launching import launch
from hpcdask.gpu.devices import Gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

HEAD = """
import json, sys
from distributed import Client, wait

client = Client()
TOTAL = int(sys.argv[1])

def tell(result):
    print(json.dumps(result))
"""

ALLOCATORS = """
def look():
    import cupy, rmm
    at_start = resource()
    x = cupy.ones(TOTAL // 10, dtype="uint8")
    owner = getattr(x.data.mem, "_owner", None)
    after = resource()
    rest = [cupy.empty(TOTAL // 10, dtype="uint8") for _ in range(5)]
    grown = resource()
    return {"kind": type(rmm.mr.get_current_device_resource()).__name__, "start": at_start,
            "after": after, "grown": grown, "by rmm": type(owner).__name__ == "DeviceBuffer",
            "cupy": cupy.get_default_memory_pool().total_bytes(), "sum": int(x[:1000].sum())}

def resource():
    import rmm
    pool = rmm.mr.get_current_device_resource()
    return pool.pool_size() if hasattr(pool, "pool_size") else None

(found,) = client.run(look).values()
tell(found)
"""

SPILLING = """
N, COUNT = 1 << 24, 16  # 128 MiB each

def make(i):
    import cupy
    return cupy.arange(N, dtype="float64") + i

def right(x, i):
    import cupy
    return type(x).__module__.startswith("cupy") and bool((x == cupy.arange(N) + i).all())

def on_host(i):
    import numpy
    return numpy.full(1 << 20, i)

def look(dask_worker):
    import os
    data = dask_worker.data
    on_disk = os.listdir(os.path.join(dask_worker.local_directory, "storage"))
    return {"device": sum(x.nbytes for x in data.device.values()), "host": len(data.host),
            "disk": len(on_disk), "all": len(data), "folder": dask_worker.local_directory}

blocks, numbers = client.map(make, range(COUNT)), client.map(on_host, range(4))
wait([*blocks, *numbers])
(found,) = client.run(look).values()
found["right"] = client.gather(client.map(right, blocks, range(COUNT)))
found["numbers"] = [bool((x == i).all()) for i, x in enumerate(client.gather(numbers))]
tell(found)
"""

FULL = """
def fill(*parts):
    import cupy
    arrays = [cupy.ones(int(part * TOTAL), dtype="uint8") for part in parts]
    return sum(int(x[-1]) for x in arrays)

results = []
for _ in range(2):
    failed = client.submit(fill, 0.44, 0.44, 0.3, pure=False)
    error = failed.exception(timeout=60)
    results.append({
        "kind": type(error).__name__, "text": str(error), "memory": isinstance(error, MemoryError),
        "cause": type(error.__cause__).__name__,
        "next": client.submit(fill, 0.44, 0.44, pure=False).result(timeout=60),
    })
workers = client.sync(client.scheduler.identity, n_workers=-1)["workers"]
tell({"results": results, "workers": [worker["name"] for worker in workers.values()]})
"""

HOLD = """
import sys
import cupy
kept = cupy.cuda.alloc(int(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""

WORKED = "from distributed import Client; Client(); print('worked')"

Run = Callable[..., Any]


@pytest.fixture
def gpu(gpus: list[Gpu]) -> Gpu:
    return gpus[0]


@pytest.fixture
def run(gpu: Gpu) -> Run:
    """Runs a program and returns what it tells."""

    def runs(program: str, *options: str, **environ: str) -> Any:
        env = {"CUDA_VISIBLE_DEVICES": gpu.uuid, **environ}
        words = [str(gpu.memory)]
        done = launch(0, *options, program=HEAD + program, words=words, env=env, timeout=150)
        return json.loads(done.out.splitlines()[-1])

    return runs


POOL, ASYNC = "PoolMemoryResource", "CudaAsyncMemoryResource"


@pytest.mark.parametrize(
    ("options", "kind", "fraction"),
    [
        (["--rmm-pool-size", "0.25"], POOL, 0.25),
        (["--rmm-async", "--protocol", "tcp"], ASYNC, None),
    ],
)
def test_cupy_allocates_as_was_asked(
    run: Run, gpu: Gpu, options: list[str], kind: str, fraction: float | None
) -> None:
    """From a pool of a fraction of the own device, or asynchronously."""
    found = run(ALLOCATORS, *options)
    assert found["kind"] == kind
    assert found["by rmm"]
    assert found["cupy"] == 0
    assert found["sum"] == 1000
    if fraction:
        assert found["start"] == found["after"] == int(fraction * gpu.memory) // 256 * 256
        assert found["grown"] > found["start"]


def test_results_spill_to_host_and_disk_and_come_back_as_they_were(
    run: Run, tmp_path: Path
) -> None:
    found = run(
        SPILLING,
        *("--device-memory-limit", "512MiB", "--rmm-pool-size", "1GiB", "--memory-limit", "4GiB"),
        *("--local-directory", str(tmp_path / "scratch")),
        DASK_DISTRIBUTED__WORKER__MEMORY__TARGET="0.2",  # 0.8 GiB on the host, the rest on disk
    )
    assert 0 < found["device"] <= 1 << 29
    assert found["host"] > 0
    assert found["disk"] > 0
    assert found["all"] == 16 + 4
    assert found["folder"].startswith(str(tmp_path / "scratch"))
    assert found["right"] == [True] * 16
    assert found["numbers"] == [True] * 4


@pytest.mark.parametrize("pool", [[], ["--rmm-pool-size", "0"]], ids=["rmm", "cupy"])
def test_a_full_device_is_told_and_the_next_task_succeeds(
    run: Run, gpu: Gpu, pool: list[str]
) -> None:
    found = run(FULL, *pool)
    assert len(found["workers"]) == 1
    for result in found["results"]:  # twice: nothing of the first failure is left
        assert result["kind"] == "DeviceMemoryError"
        assert result["memory"]
        assert result["cause"] == "MemoryError"  # whose client may have no CuPy
        name = "CuPy's pool of" if pool else "the RMM pool of"
        for words in (found["workers"][0], gpu.name, gpu.uuid, name, " are free", "smaller chunks"):
            assert words in result["text"]
        assert "unknown" not in result["text"]
        assert result["next"] == 2


def test_what_another_process_left_on_the_device_is_told_at_start(run: Run, gpu: Gpu) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(int(0.7 * gpu.memory))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid},
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        env = {"CUDA_VISIBLE_DEVICES": gpu.uuid}
        done = launch(0, program=WORKED, env=env, code=None)
        holder.communicate(timeout=30)
    assert "worked" not in done.out
    for words in ("no room for an RMM pool of", gpu.uuid, "are free", "--rmm-pool-size"):
        assert words in done.err
    assert run("tell(client.submit(len, 'one').result())") == 3
