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

from gpu_launching import run_python
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
N, COUNT = 1 << 25, 16  # 256 MiB each

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

Run = Callable[..., Any]


@pytest.fixture
def gpu(gpus: list[Gpu]) -> Gpu:
    return gpus[0]


@pytest.fixture
def run(gpu: Gpu, tmp_path: Path) -> Run:
    """Runs a program and returns what it tells; or its end, where `fails`."""

    def runs(program: str, *options: str, fails: bool = False, **environ: str) -> Any:
        script = tmp_path / "program.py"
        script.write_text(HEAD + program)
        words = ["-m", "hpcdask.run", *options, str(script), str(gpu.memory)]
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid, **environ}
        done = run_python(*words, env=env, check=not fails)
        return done if fails else json.loads(done.stdout.splitlines()[-1])

    return runs


@pytest.mark.parametrize(("options", "fraction"), [([], 0.5), (["--rmm-pool-size", "0.25"], 0.25)])
def test_cupy_allocates_from_a_pool_of_a_fraction_of_the_own_device(
    run: Run, gpu: Gpu, options: list[str], fraction: float
) -> None:
    found = run(ALLOCATORS, *options)
    assert found["kind"] == "PoolMemoryResource"
    assert found["start"] == int(fraction * gpu.memory) // 256 * 256
    assert found["after"] == found["start"]
    assert found["grown"] > found["start"]
    assert found["by rmm"]
    assert found["cupy"] == 0
    assert found["sum"] == 1000


def test_without_a_pool_cupy_has_its_own(run: Run, gpu: Gpu) -> None:
    found = run(ALLOCATORS, "--rmm-pool-size", "0")
    assert found["kind"] == "CudaMemoryResource"
    assert not found["by rmm"]
    assert found["cupy"] >= gpu.memory // 10
    assert found["sum"] == 1000


def test_asynchronous_allocator(run: Run) -> None:
    found = run(ALLOCATORS, "--rmm-async", "--protocol", "tcp")
    assert found["kind"] == "CudaAsyncMemoryResource"
    assert found["by rmm"]
    assert found["cupy"] == 0


def test_results_spill_to_host_and_disk_and_come_back_as_they_were(
    run: Run, tmp_path: Path
) -> None:
    found = run(
        SPILLING,
        *("--device-memory-limit", "1GiB", "--rmm-pool-size", "2GiB", "--memory-limit", "8GiB"),
        *("--local-directory", str(tmp_path / "scratch")),
        DASK_DISTRIBUTED__WORKER__MEMORY__TARGET="0.2",  # 1.6 GiB on the host, the rest on disk
    )
    assert 0 < found["device"] <= 1 << 30
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
        done = run("tell('started')", fails=True)
        holder.communicate(timeout=30)
    assert done.returncode != 0
    assert "started" not in done.stdout
    for words in ("no room for an RMM pool of", gpu.uuid, "are free", "--rmm-pool-size"):
        assert words in done.stderr
    assert run("tell('started')") == "started"
