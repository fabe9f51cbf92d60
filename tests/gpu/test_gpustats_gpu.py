"""What the GPUs do: the same figures as nvidia-smi's, and where they are shown."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import hpcdask
from gpu_launching import run_python, slurm_answers
from hpcdask.gpu.devices import Gpu
from hpcdask.gpu.samples import GpuSample, read_sample
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
MATMUL = """
import sys, time, cupy
x = cupy.random.random((8192, 8192), dtype="f4")
(x @ x).sum().get()
print("ready", flush=True)
until = time.monotonic() + float(sys.argv[1])
while time.monotonic() < until:
    for _ in range(10):
        y = x @ x
    cupy.cuda.Device().synchronize()
"""
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

workers = list(client.scheduler_info(n_workers=-1)["workers"])
futures = [client.submit(work, 15, workers=[one], pure=False) for one in workers]
deadline = time.monotonic() + 60
while not hpcdask.gpus(client) and time.monotonic() < deadline:
    time.sleep(0.2)
time.sleep(5)
table = hpcdask.gpus(client)
client.gather(futures)
print(json.dumps({
    "states": [one.to_json() for one in table], "text": repr(table),
    "workers": len(workers),
}))
"""


@pytest.fixture
def whole(gpus: list[Gpu]) -> list[Gpu]:
    """The GPUs that are not sliced: of slices nvidia-smi and NVML tell next to nothing."""
    found = [gpu for gpu in gpus if gpu.uuid.startswith("GPU-")]
    if not found:
        pytest.skip("all GPUs are sliced")
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no nvidia-smi here")
    return found


def read(uuids: list[str]) -> list[GpuSample]:
    found = list(map(read_sample, uuids))
    assert None not in found
    return found


@contextlib.contextmanager
def read_often(uuids: list[str]) -> Iterator[list[GpuSample]]:
    """Samples every 0.05 s while the block runs."""
    samples = read(uuids)
    end = threading.Event()

    def read_on() -> None:
        while not end.wait(0.05):
            samples.extend(read(uuids))

    thread = threading.Thread(target=read_on)
    thread.start()
    try:
        yield samples
    finally:
        end.set()
        thread.join()
        samples.extend(read(uuids))


def smi(*arguments: str) -> str:
    done = subprocess.run(
        ["nvidia-smi", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def disagreement(uuids: list[str]) -> list[str]:
    """What nvidia-smi says otherwise than any reading during its run."""
    names = ",".join(name for name, *_ in FIGURES)
    with read_often(uuids) as samples:
        text = smi(f"--query-gpu=uuid,{names}", "--format=csv,noheader,nounits")
    wrong = []
    for line in text.splitlines():
        uuid, *values = (part.strip() for part in line.split(","))
        seen = [one for one in samples if one.uuid == uuid]
        for (name, ours, unit, rounding), value in zip(FIGURES, values, strict=True):
            mine = [getattr(one, ours) for one in seen]
            if not seen:
                continue
            known = [one for one in mine if one is not None]
            if not re.fullmatch(r"[\d.]+", value):
                if known and value != "[Unknown Error]":
                    wrong.append(f"{name} of {uuid}: {value}, here {known[:3]}")
                continue
            theirs = float(value) * unit
            if not known or not min(known) - rounding <= theirs <= max(known) + rounding:
                wrong.append(f"{name} of {uuid}: {theirs}, here {sorted(set(mine), key=str)[:5]}")
    return wrong


def test_figures_agree_with_nvidia_smi(whole: list[Gpu]) -> None:
    uuids = [gpu.uuid for gpu in whole]
    for _ in range(5):  # what changes between two readings may lie outside of both
        if not (wrong := disagreement(uuids)):
            return
    pytest.fail("\n".join(wrong))


def test_nvlink_bytes_agree_with_nvidia_smi(whole: list[Gpu]) -> None:
    uuids = [gpu.uuid for gpu in whole]
    before, text, after = read(uuids), smi("nvlink", "-gt", "d"), read(uuids)
    blocks = dict(re.findall(r"UUID: (GPU-[\w-]+)\)(.*?)(?=GPU \d+:|\Z)", text, re.DOTALL))
    compared = 0
    for one, later in zip(before, after, strict=True):
        block = blocks.get(one.uuid, "")
        for word, field in (("Tx", "nvlink_sent"), ("Rx", "nvlink_received")):
            links = [int(n) for n in re.findall(rf"Data {word}: (\d+) KiB", block)]
            if not links:
                assert getattr(one, field) in (None, 0), text
                continue
            first, last = getattr(one, field), getattr(later, field)
            assert first is not None, text
            assert first - 1024 <= 1024 * sum(links) <= last + 1024, (first, sum(links), last, text)
            compared += 1
    print(f"{compared} NVLink counters compared")


def test_energy_is_the_integral_of_power(whole: list[Gpu]) -> None:
    pytest.importorskip("cupy")
    gpu = whole[0]
    program = subprocess.Popen(
        [sys.executable, "-c", MATMUL, "60"],
        stdout=subprocess.PIPE,
        text=True,
        env=None if len(whole) == 1 else {**os.environ, "CUDA_VISIBLE_DEVICES": gpu.uuid},
    )
    try:
        assert program.stdout.readline() == "ready\n"
        read_sample(gpu.uuid)  # starts NVML
        time.sleep(3)  # power is a mean over a second
        samples: list[GpuSample] = []
        used, began = time.thread_time(), time.monotonic()
        for second in range(21):
            time.sleep(max(0.0, began + second - time.monotonic()))
            samples.append(read_sample(gpu.uuid))
        used = time.thread_time() - used
        assert program.poll() is None
    finally:
        program.kill()
        program.wait()
    print(f"a reading took {1000 * used / 21:.2f} ms of a core")
    integral = sum(
        (two.time - one.time) * (one.power_w + two.power_w) / 2
        for one, two in itertools.pairwise(samples)
    )
    energy = samples[-1].energy_j - samples[0].energy_j
    print(f"energy {energy:.0f} J, integral of power {integral:.0f} J")
    assert energy == pytest.approx(integral, rel=0.05)
    assert samples[-1].utilisation > 50


def test_a_run_shows_its_gpus_and_sums_them_up(gpus: list[Gpu], tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = run_python("-m", "hpcdask.run", str(script), timeout=300)
    print(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    print(found["text"])
    assert found["workers"] == len(gpus)
    assert {one["sample"]["uuid"] for one in found["states"]} == {gpu.uuid for gpu in gpus}
    for state in found["states"]:
        if state["pool"] is not None and state["sample"]["memory_used"] is not None:
            assert 0 < state["pool"] <= state["sample"]["memory_used"] + 2**30
    busy = [one["sample"]["utilisation"] for one in found["states"]]
    assert all(one is None or one > 50 for one in busy), busy
    (line,) = (line for line in done.stderr.splitlines() if "hpcdask: GPUs: " in line)
    assert f"{len(gpus)} x {gpus[0].name}" in line
    if gpus[0].uuid.startswith("GPU-"):
        shown = re.search(
            r"([\d.e-]+) GPU hours, mean utilisation (\d+) %, peak memory \S+ \w+ of \S+ \w+, "
            r"energy ([\d.e-]+) kWh",
            line,
        )
        assert shown, line
        hours, utilisation, energy = map(float, shown.groups())
        assert 15 / 3600 * len(gpus) < hours < 240 / 3600 * len(gpus)
        assert utilisation > 30
        assert 0 < energy < 1.5 * hours, "less than 1.5 kW for each"
    assert done.stderr.index("ready in") < done.stderr.index("hpcdask: GPUs: ")


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
    """Jobs of SLURM's where it answers; WIDGET_HTML names a file for what a notebook shows."""
    options = {"cores": 1, "memory": "4GiB", "walltime": "00:10:00", "poll_interval": 1}
    folder = {"shared_temp_directory": str(tmp_path / "clusters")}
    cluster_class = hpcdask.SLURMCUDACluster if slurm_answers() else hpcdask.LocalCUDAJobCluster
    with (
        cluster_class(**options, **folder) as cluster,
        cluster.get_client() as client,
    ):
        assert cluster.gpus() == ()
        cluster.scale(len(gpus))
        client.wait_for_workers(len(gpus), timeout=120)
        wait_for(lambda: len(cluster.gpus()) == len(gpus), 60, "samples of all GPUs")
        print(cluster.gpus())
        assert {one.sample.uuid for one in cluster.gpus()} == {gpu.uuid for gpu in gpus}
        summary = cluster.gpus().summary()
        assert f"{len(gpus)} x {gpus[0].name}" in summary
        shown = cluster._repr_html_()
        assert f"<strong>GPUs:</strong> {summary.partition(',')[0]}" in shown
        if path := os.environ.get("WIDGET_HTML"):
            Path(path).write_text(shown.replace("<details>", "<details open>", 2))
        wait_for(lambda: len(hpcdask.gpus(client)) == len(gpus), 60, "the same by a client")
    assert "hpcdask: GPUs: " in capsys.readouterr().err
