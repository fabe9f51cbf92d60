"""The runner on real GPUs: which worker gets which device, and what runs there."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from gpu_launching import EXCHANGE, RUN, launch, nvlink_joins, sharing, slurm_answers
from hpcdask.gpu.devices import Gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

REPORT = """
import json, os
from distributed import Client

def look():
    import cupy
    return {"visible": os.environ["CUDA_VISIBLE_DEVICES"],
            "count": cupy.cuda.runtime.getDeviceCount(), "sum": float(cupy.arange(10.0).sum())}

client = Client()
first = client.run(look)
client.restart()
again = client.run(look)
print(json.dumps([list(first.values()), list(again.values())]))
"""


@pytest.mark.parametrize(
    "wrapper",
    [
        None,
        "",
        'test "$OMPI_COMM_WORLD_RANK" != 0 || export CUDA_VISIBLE_DEVICES=0',
    ],
    ids=["no launcher", "ranks see all", "the first sees its own"],
)
def test_every_worker_has_its_own_gpu_also_after_a_restart(
    gpus: list[Gpu], wrapper: str | None
) -> None:
    ranks = 0 if wrapper is None else len(gpus)
    done = launch(ranks, "--rmm-pool-size", "0.3", program=REPORT, wrapper=wrapper or "")
    for workers in json.loads(done.out.splitlines()[-1]):
        assert sorted(w["visible"] for w in workers) == sorted(gpu.uuid for gpu in gpus)
        assert all(w["count"] == 1 and w["sum"] == 45.0 for w in workers)
    assert f"{len(gpus)} x {gpus[0].name}" in done.err


@pytest.mark.parametrize(("protocol", "tls"), [("tcp", ""), ("auto", ""), ("ucx", "tcp,cuda_copy")])
def test_exchange_between_workers(gpus: list[Gpu], protocol: str, tls: str) -> None:
    env = {"UCX_TLS": tls} if tls else None
    done = launch(len(gpus), "--protocol", protocol, program=EXCHANGE, env=env)
    result = json.loads(done.out.removeprefix("exchanged "))
    assert result["right"]
    assert result["addresses"] == ["tls"]
    ucx = protocol == "ucx" or (protocol == "auto" and nvlink_joins(gpus))
    assert set(result["transports"]) == ({"ucx"} if ucx and len(gpus) > 1 else set())
    assert ("ucx between workers" in done.err) == ucx
    if nvlink_joins(gpus):
        assert ("CUDA IPC is active" in done.err) == (ucx and not tls)
        assert ("CUDA IPC (NVLink) is not in use" in done.err) == bool(tls)


def test_a_step_with_a_gpu_for_each_rank_uses_cuda_ipc(gpus: list[Gpu], tmp_path: Path) -> None:
    if not nvlink_joins(gpus) or not slurm_answers():
        pytest.skip("no NVLink between the GPUs of this machine, or no SLURM that answers")
    (tmp_path / "exchange.py").write_text(EXCHANGE)
    srun = ["srun", f"-n{len(gpus)}", "--gpus-per-task=1", "--mpi=none", *RUN, "--protocol", "ucx"]
    pipes = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    done = subprocess.run([*srun, tmp_path / "exchange.py"], timeout=90, **pipes)
    assert done.returncode == 0, done.stderr
    assert f"{len(gpus)} x {gpus[0].name}" in done.stderr
    assert "CUDA IPC is active" in done.stderr


REUSED = """
import json
from distributed import Client

def make(value):
    import cupy
    memory = cupy.cuda.Memory(2**22)  # of the driver, past every pool
    array = cupy.ndarray(2**22, "uint8", memptr=cupy.cuda.MemoryPointer(memory, 0))
    array.fill(value)
    return array

def address(array):
    return array.data.ptr

def content(array):
    return sorted(set(array.get().tolist()))

client = Client()
there, here = list(client.nthreads())[:2]
addresses, contents = [], []
for value in range(20):
    array = client.submit(make, value, workers=[there], pure=False)
    addresses.append(client.submit(address, array, workers=[there], pure=False).result())
    contents.append(client.submit(content, array, workers=[here], pure=False).result())
    del array
    client.run(lambda: __import__("gc").collect())
used = client.run(lambda dask_worker: list(dask_worker.peer_transports.values()))
print(json.dumps({"addresses": addresses, "contents": contents,
                  "transports": sum(used.values(), [])}))
"""


def test_memory_that_is_freed_and_used_again_is_sent_anew(gpus: list[Gpu]) -> None:
    if len(gpus) < 2:
        pytest.skip("needs two GPUs")
    found = json.loads(launch(2, "--protocol", "ucx", program=REUSED).out)
    assert set(found["transports"]) == {"ucx"}
    assert len(set(found["addresses"])) < len(found["addresses"])
    assert found["contents"] == [[value] for value in range(20)]


GROUPS = """
from distributed import Client

def make():
    import cupy
    return cupy.arange(1000)

def look(x):
    return type(x).__module__.partition(".")[0], int(x.sum())

with Client() as client:
    made = client.submit(make, resources={"GPU": 1})
    print(client.submit(look, made, resources={"GPU": 1}, pure=False).result())
    print(client.submit(look, made, resources={"CPU": 1}, pure=False).result())
"""


@pytest.mark.parametrize("ranks", [0, 3])
def test_data_go_from_a_worker_on_the_gpu_to_one_on_the_cpu(gpus: list[Gpu], ranks: int) -> None:
    done = launch(ranks, "--groups", "gpu:1 cpu:2", program=GROUPS)
    assert done.out.splitlines() == ["('cupy', 499500)", "('hpcdask', 499500)"]
    assert f"3 workers on 1 node (1 x {gpus[0].name}, 2 x CPU)" in done.err


#: dask alone would do these by P2P, which fails with CuPy arrays.
RECHUNK = """
import cupy
import dask, dask.array as da, numpy as np
from distributed import Client

dask.config.set({"array.chunk-size": "1 B"})  # else dask joins chunks before
client = Client()
client.wait_for_workers(2)
x = np.random.default_rng(1).random((512, 300))
y = da.from_array(x, (8, 300)).map_blocks(cupy.asarray, dtype=float, meta=cupy.empty((0, 0)))
columns = y.rechunk((512, 4))
spectrum = da.fft.fft(y.rechunk({0: -1, 1: 7}), axis=0)
print(np.array_equal(columns.compute().get(), x))
print(np.allclose(spectrum.compute().get(), np.fft.fft(x, axis=0)))
"""


def test_rechunks_of_many_chunks_are_right(gpus: list[Gpu]) -> None:
    done = launch(2, *sharing(2, gpus), program=RECHUNK, timeout=120)
    assert done.out == "True\nTrue\n"


def test_the_first_program_of_the_documentation(gpus: list[Gpu]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "getting-started.md").read_text()
    program = re.search(r"^cat > gpu.py <<'EOF'\n(.*?)^EOF$", page, re.MULTILINE | re.DOTALL)
    done = launch(0, program=program[1])
    assert f"{len(gpus)} worker" in done.err
    assert done.out in ("mean 0.0\n", "mean -0.0\n")
