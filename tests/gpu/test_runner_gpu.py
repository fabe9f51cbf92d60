"""The runner on real GPUs: which worker gets which device, and what runs there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gpu_launching import EXCHANGE, launch, nvlink_joins, run_python, slurm_answers
from hpcdask.gpu.devices import Gpu

pytestmark = pytest.mark.gpu

REPORT = """
import json, os
from distributed import Client

def look():
    import cupy
    from distributed.diagnostics.nvml import has_cuda_context
    import pynvml
    pynvml.nvmlInit()
    with_me = []
    for i in range(pynvml.nvmlDeviceGetCount()):
        handle = pynvml.nvmlDeviceGetHandleByIndex(i)
        uuid = pynvml.nvmlDeviceGetUUID(handle)
        pids = [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)]
        if os.getpid() in pids:
            with_me.append(uuid)
    return {"visible": os.environ["CUDA_VISIBLE_DEVICES"], "contexts": with_me,
            "count": cupy.cuda.runtime.getDeviceCount(), "sum": float(cupy.arange(10.0).sum())}

client = Client()
first = client.run(look)
client.restart()
again = client.run(look)
print(json.dumps([list(first.values()), list(again.values())]))
"""


def test_every_worker_has_its_own_gpu_also_after_a_restart(gpus: list[Gpu], tmp_path: Path) -> None:
    script = tmp_path / "report.py"
    script.write_text(REPORT)
    done = launch(len(gpus), str(script))
    assert done.returncode == 0, done.stderr
    for workers in json.loads(done.stdout.splitlines()[-1]):
        assert sorted(w["visible"] for w in workers) == sorted(gpu.uuid for gpu in gpus)
        for worker in workers:
            assert worker["count"] == 1
            assert worker["sum"] == 45.0
    assert f"{len(gpus)} x {gpus[0].name}" in done.stderr


def test_more_ranks_than_gpus_is_an_error(gpus: list[Gpu], tmp_path: Path) -> None:
    script = tmp_path / "never.py"
    script.write_text("print('started')")
    done = launch(len(gpus) + 1, str(script))
    assert done.returncode == 2
    assert "started" not in done.stdout
    assert f"{len(gpus) + 1} workers for GPUs but only {len(gpus)} distinct GPU" in done.stderr


def test_oversubscribe_shares_a_gpu(gpus: list[Gpu], tmp_path: Path) -> None:
    script = tmp_path / "two.py"
    script.write_text("from distributed import Client\nprint(len(Client().run(int)))")
    done = launch(len(gpus) + 1, "--oversubscribe", str(script))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(len(gpus) + 1)]


@pytest.mark.parametrize(("workload", "size"), [("array", "50GB"), ("svd", "10GB")])
def test_workloads_are_right(gpus: list[Gpu], workload: str, size: str) -> None:
    done = launch(len(gpus), "-m", "hpcdask.bench", workload, "--size", size, "--repeats", "1")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["devices"] == {gpus[0].name: len(gpus)}
    assert all(check["ok"] for check in record["checks"])


@pytest.mark.parametrize("protocol", ["tcp", "ucx", "auto"])
def test_exchange_between_workers(gpus: list[Gpu], tmp_path: Path, protocol: str) -> None:
    script = tmp_path / "transpose.py"
    script.write_text(EXCHANGE)
    done = launch(len(gpus), "--protocol", protocol, str(script))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.removeprefix("exchanged "))
    assert result["right"]
    assert result["addresses"] == ["tls"]
    ucx = protocol == "ucx" or (protocol == "auto" and nvlink_joins(gpus))
    assert set(result["transports"]) == ({"ucx"} if ucx and len(gpus) > 1 else set())
    assert ("ucx between workers" in done.stderr) == ucx


WARM = """
from distributed import Client
from hpcdask.bench.cluster import wait_until_warm
wait_until_warm(Client())
"""


@pytest.mark.parametrize("tls", [None, "tcp,cuda_copy"])
def test_the_run_says_whether_cuda_ipc_is_active(
    gpus: list[Gpu], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: str | None
) -> None:
    if not nvlink_joins(gpus):
        pytest.skip("NVLink does not join the GPUs of this machine")
    script = tmp_path / "warm.py"
    script.write_text(WARM)
    if tls:
        monkeypatch.setenv("UCX_TLS", tls)
    done = launch(len(gpus), "--protocol", "ucx", str(script))
    assert done.returncode == 0, done.stderr
    assert ("CUDA IPC is active" in done.stderr) == (tls is None)
    assert ("CUDA IPC (NVLink) is not in use" in done.stderr) == (tls is not None)
    assert not done.stdout


def test_a_step_with_a_gpu_for_each_rank_uses_cuda_ipc(gpus: list[Gpu], tmp_path: Path) -> None:
    if not nvlink_joins(gpus) or not slurm_answers():
        pytest.skip("no NVLink between the GPUs of this machine, or no SLURM that answers")
    script = tmp_path / "warm.py"
    script.write_text(WARM)
    srun = ["srun", f"-n{len(gpus)}", "--gpus-per-task=1", "--mpi=none"]
    done = subprocess.run(
        [*srun, sys.executable, "-m", "hpcdask.run", "--protocol", "ucx", str(script)],
        capture_output=True,
        text=True,
        timeout=90,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(gpus)} x {gpus[0].name}" in done.stderr
    assert "CUDA IPC is active" in done.stderr


@pytest.mark.parametrize(
    "wrapper",
    [
        "export CUDA_VISIBLE_DEVICES=$OMPI_COMM_WORLD_LOCAL_RANK",  # each its own
        'test "$OMPI_COMM_WORLD_RANK" != 0 || export CUDA_VISIBLE_DEVICES=0',  # the first only
    ],
)
def test_ranks_that_see_different_gpus_of_a_node(
    gpus: list[Gpu], tmp_path: Path, wrapper: str
) -> None:
    script = tmp_path / "report.py"
    script.write_text(REPORT)
    done = launch(len(gpus), "--rmm-pool-size", "0.3", str(script), wrapper=wrapper)
    assert done.returncode == 0, done.stderr
    for workers in json.loads(done.stdout.splitlines()[-1]):
        assert sorted(w["visible"] for w in workers) == sorted(gpu.uuid for gpu in gpus)
        assert all(w["count"] == 1 and w["sum"] == 45.0 for w in workers)


def test_without_a_launcher_there_is_a_worker_for_each_gpu(gpus: list[Gpu], tmp_path: Path) -> None:
    script = tmp_path / "count.py"
    script.write_text("from distributed import Client\nprint(len(Client().run(int)))")
    done = run_python("-m", "hpcdask.run", str(script), timeout=60)
    assert done.stdout.split() == [str(len(gpus))]


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


def test_memory_that_is_freed_and_used_again_is_sent_anew(gpus: list[Gpu], tmp_path: Path) -> None:
    if len(gpus) < 2:
        pytest.skip("needs two GPUs")
    script = tmp_path / "reused.py"
    script.write_text(REUSED)
    done = launch(2, "--protocol", "ucx", str(script))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert set(found["transports"]) == {"ucx"}
    assert len(set(found["addresses"])) < len(found["addresses"])
    assert found["contents"] == [[value] for value in range(20)]
