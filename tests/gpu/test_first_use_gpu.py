"""What is loaded on a real GPU before the first Dask task, and that it holds no memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_launching import launch
from hpcdask.gpu.devices import Gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

#: Kernels and libraries stay loaded; handles of cuBLAS and cuSOLVER, which have 160 MB, do not.
MOST_NBYTES = 128 << 20

ALONE = """
import json
from hpcdask.gpu.context import FirstUse, _steps, make_context
make_context()
import cupy
cupy.zeros(8)
free = lambda: cupy.cuda.runtime.memGetInfo()[0]
before, use = free(), FirstUse()
use.start()
use._thread.join(200)
cupy.get_default_memory_pool().free_all_blocks()
held = before - free()
for _ in _steps():
    pass  # would raise what the thread keeps for itself
print(json.dumps({"over": not use._thread.is_alive(), "held": held}))
"""

WAITS = """
import time
from distributed import Client
client = Client()
def over(dask_worker):
    thread = dask_worker._first_use._thread
    return thread.ident is not None and not thread.is_alive()
while not all(client.run(over).values()):
    time.sleep(0.1)
def loaded():
    import sys
    return "cupy" in sys.modules
print("loaded", all(client.run(loaded).values()))
import dask
print(dask.config.get("array.chunk-size"), dask.config.get("array.rechunk.method"))
"""

AT_ONCE = """
import time
from distributed import Client
client = Client()
print("sum", client.submit(lambda: __import__("cupy").arange(10).sum().item()).result())
def ends(dask_worker):
    use = dask_worker._first_use
    return use._stopped.is_set() and not use._thread.is_alive()
while not any(client.run(ends).values()):
    time.sleep(0.1)
print("stopped")
"""


def test_memory_is_given_back(gpus: list[Gpu]):
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=220, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print(found)
    assert found["over"]
    assert found["held"] < MOST_NBYTES


@pytest.mark.parametrize(
    ("program", "said"), [(WAITS, "loaded True\n512MiB tasks\n"), (AT_ONCE, "sum 45\nstopped\n")]
)
def test_workers_load_until_a_dask_task_comes(
    program: str, said: str, gpus: list[Gpu], tmp_path: Path
):
    script = tmp_path / "program.py"
    script.write_text(program)
    done = launch(1, str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout == said
