"""What the GPUs do: the same figures as nvidia-smi's, and where they are shown."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import hpcdask
from gpu_launching import job_cluster, launch, run_python, slurm_answers
from hpcdask.gpu.devices import Gpu
from hpcdask.gpu.samples import read_gpu
from launching import wait_for

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

#: Name at nvidia-smi, ours, unit of theirs in ours, and what one of theirs may differ by.
FIGURES = [
    ("utilization.gpu", "utilisation", 1, 1),
    ("memory.used", "memory_used", 2**20, 2**20),
    ("memory.total", "memory_total", 2**20, 2**20),
    ("power.draw", "power_w", 1, 1),
    ("clocks.sm", "clock_mhz", 1, 15),  # a step of the clock
    ("temperature.gpu", "temperature_c", 1, 1),
    ("ecc.errors.corrected.volatile.total", "ecc_corrected", 1, 0),
    ("ecc.errors.uncorrected.volatile.total", "ecc_uncorrected", 1, 0),
]
PROGRAM = """
import json, time
import hpcdask
from distributed import Client

client = Client()

def work(seconds):
    import cupy
    x = cupy.random.random((8192, 8192), dtype="f4")
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(10):
            y = x @ x
        cupy.cuda.Device().synchronize()

workers = list(client.nthreads())
futures = [client.submit(work, 6, workers=[one], pure=False) for one in workers]
deadline = time.monotonic() + 60
busy = table = ()
while len(busy) < len(workers):
    assert time.monotonic() < deadline, table
    time.sleep(0.2)
    table = hpcdask.gpus(client)
    busy = [one for one in table if one.utilisation is None or one.utilisation > 50]
client.gather(futures)
print(json.dumps({
    "states": [one.to_json() for one in table], "text": repr(table),
    "workers": len(workers),
}))
"""


def disagreement(gpu: Gpu) -> list[str]:
    """Return what nvidia-smi says otherwise of a GPU than the readings before and after it."""
    query = ["nvidia-smi", "--format=csv,noheader,nounits", "-i", gpu.uuid]
    query.append(f"--query-gpu={','.join(name for name, *_ in FIGURES)}")
    before = read_gpu(gpu.uuid)
    texts = subprocess.check_output(query, text=True).split(",")
    after = read_gpu(gpu.uuid)
    wrong = []
    for (name, ours, unit, rounding), text in zip(FIGURES, map(str.strip, texts), strict=True):
        mine = [getattr(before, ours), getattr(after, ours)]
        if None in mine or not re.fullmatch(r"[\d.]+", text):
            same = None in mine and not re.fullmatch(r"[\d.]+", text)
        else:
            same = min(mine) - rounding <= float(text) * unit <= max(mine) + rounding
        wrong += [] if same else [f"{name}: {text}, here {mine}"]
    return wrong


def test_figures_agree_with_nvidia_smi(gpus: list[Gpu]) -> None:
    """Of slices it tells next to nothing."""
    whole = [gpu for gpu in gpus if gpu.uuid.startswith("GPU-")]
    if not whole or shutil.which("nvidia-smi") is None:
        pytest.skip("all GPUs are sliced, or no nvidia-smi here")
    for gpu in whole:  # what changes between two readings may lie outside of both
        wait_for(lambda gpu=gpu: not disagreement(gpu), 5, str(disagreement(gpu)))


def test_a_run_shows_its_gpus_and_sums_them_up(gpus: list[Gpu]) -> None:
    done = launch(0, program=PROGRAM)
    print(done.err)
    found = json.loads(done.out.splitlines()[-1])
    print(found["text"])
    assert found["workers"] == len(gpus)
    assert {one["uuid"] for one in found["states"]} == {gpu.uuid for gpu in gpus}
    for state in found["states"]:
        if state["pool"] is not None and state["memory_used"] is not None:
            assert 0 < state["pool"] <= state["memory_used"] + 2**30
    (line,) = (line for line in done.err.splitlines() if "hpcdask: GPUs: " in line)
    assert f"{len(gpus)} x {gpus[0].name}" in line
    if gpus[0].uuid.startswith("GPU-"):
        shown = re.search(
            r"([\d.e-]+) GPU hours, mean utilisation (\d+) %, peak memory \S+ \w+ of \S+ \w+, "
            r"energy ([\d.e-]+) kWh",
            line,
        )
        assert shown, line
        hours, utilisation, energy = map(float, shown.groups())
        assert 3 / 3600 * len(gpus) < hours < 240 / 3600 * len(gpus)
        assert utilisation > 30
        assert 0 < energy < 1.5 * hours, "less than 1.5 kW for each"
    assert done.err.index("ready in") < done.err.index("hpcdask: GPUs: ")


def test_a_submitted_run_sums_them_up(gpus: list[Gpu], tmp_path: Path) -> None:
    if not slurm_answers():
        pytest.skip("no SLURM that answers")
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    job = ["--wait", "--gpus-per-node", str(len(gpus)), "-t", "00:10:00", "--mem", "8GiB"]
    done = run_python("-m", "hpcdask", "submit", *job, str(script), cwd=tmp_path, timeout=300)
    print(done.stdout[-3000:], done.stderr[-3000:])
    (line,) = (one for one in done.stdout.splitlines() if "hpcdask: GPUs: " in one)
    assert f"{len(gpus)} x {gpus[0].name}" in line


def test_a_cluster_of_jobs_shows_its_gpus(
    gpus: list[Gpu], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Jobs of SLURM's where it answers."""
    with job_cluster(tmp_path, len(gpus), slurm_answers()) as (cluster, client):
        wait_for(lambda: len(cluster.gpus()) == len(gpus), 60, "samples of all GPUs")
        assert {one.uuid for one in cluster.gpus()} == {gpu.uuid for gpu in gpus}
        summary = cluster.gpus().summary()
        assert f"{len(gpus)} x {gpus[0].name}" in summary
        assert f"<strong>GPUs:</strong> {summary.partition(',')[0]}" in cluster._repr_html_()
        wait_for(lambda: len(hpcdask.gpus(client)) == len(gpus), 60, "the same by a client")
    assert "hpcdask: GPUs: " in capsys.readouterr().err
