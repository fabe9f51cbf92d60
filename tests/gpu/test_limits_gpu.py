"""The rates of real GPUs are those of GPUs, also with a pool that holds nearly all memory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from gpu_launching import run_python
from hpcdask.gpu.devices import Gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

PROGRAM = """
import json, time
from distributed import Client
from hpcdask.bench.cluster import inspect
from hpcdask.bench.rates import measure

client = Client()
cluster = inspect(client, "cuda")
start = time.perf_counter()
rates = measure(cluster)
print(json.dumps({"rates": rates, "seconds": time.perf_counter() - start,
                  "workers": sum(cluster.devices.values())}))
"""


@pytest.mark.parametrize("pool", [[], ["--rmm-pool-size", "0"]], ids=["rmm", "cupy"])
def test_rates_of_gpus(gpus: list[Gpu], tmp_path: Path, pool: list[str]) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    chosen = ",".join(gpu.uuid for gpu in gpus[:2])
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": chosen}
    done = run_python("-m", "hpcdask.run", *pool, str(script), env=env)
    told = json.loads(done.stdout.splitlines()[-1])
    rates, n = told["rates"], told["workers"]
    assert n == min(2, len(gpus))
    # Between the slowest GPU that CUDA 12 still runs on and several times the fastest.
    assert 5e10 < rates["memory"] / n < 5e13
    assert 1e8 < rates["random"] / n < 1e13
    assert 1e10 < rates["matrix_float64"] / n < 1e15
    assert 1e11 < rates["matrix_float32"] / n < 1e16
    assert told["seconds"] < 60
