"""What is read of NVML's stand-in (tests/fakes/pynvml.py), and what a run's sums make of it."""

from __future__ import annotations

import json

import pytest

from hpcdask.gpu.samples import GpuSample, read_sample
from hpcdask.gpu.usage import GpuUsage, RunUsage, summary

GIB = 2**30
BUSY = {
    "utilisation": 80,
    "used": 20 * GIB,
    "power": 350_250,
    "energy": 9_000_000,
    "reasons": 0x4 | 0x1,
    "clock": 1755,
    "temperature": 61,
    "fields": {"3:0": 0, "4:0": 0, "138:4294967295": 2000, "139:4294967295": 30},
}
SLICE = {"uuid": "MIG-a", "name": "slice", "now": {"used": GIB}}
NODE = [
    {"uuid": "GPU-a", "name": "NVIDIA H100", "now": BUSY},
    {"uuid": "GPU-b", "mig": [SLICE]},
    {"uuid": "GPU-c", "forbidden": True},
]


def test_what_nvml_tells(nvml):
    nvml(NODE)
    one = read_sample("GPU-a")
    assert (one.uuid, one.index, one.model) == ("GPU-a", 0, "NVIDIA H100")
    assert one.label == f"{one.host} GPU 0"
    assert (one.utilisation, one.memory_used, one.memory_total) == (80, 20 * GIB, 80 * GIB)
    assert (one.power_w, one.energy_j) == (350.25, 9000.0)
    assert one.held_back == ["power cap"]
    assert (one.clock_mhz, one.temperature_c) == (1755, 61)
    assert (one.ecc_corrected, one.ecc_uncorrected) == (0, 0)
    assert (one.nvlink_sent, one.nvlink_received) == (2000 * 1024, 30 * 1024)
    assert one.pcie_sent is None, "the driver has no such field"
    assert GpuSample.from_json(json.loads(json.dumps(one.to_json()))) == one


def test_what_is_not_told_is_unknown(nvml):
    nvml(NODE)
    one = read_sample("MIG-a")
    assert one.label == f"{one.host} GPU MIG-a"
    assert one.memory_used == GIB
    told = (one.index, one.utilisation, one.power_w, one.energy_j, one.held_back, one.nvlink_sent)
    assert told == (None,) * 6


@pytest.mark.parametrize("uuid", ["GPU-c", "GPU-nowhere", "without a driver"])
def test_a_gpu_that_nvml_does_not_show(nvml, monkeypatch, uuid):
    nvml(NODE)
    if uuid == "without a driver":
        monkeypatch.delenv("FAKE_NVML")
    assert read_sample(uuid) is None


# Sums over a run


def sample(at: float, **values: object) -> GpuSample:
    """A sample of a GPU that is busy for half of the time, after so many seconds."""
    how = {
        "host": "n1",
        "index": 0,
        "model": "H100",
        "memory_total": 80 * GIB,
        "memory_used": 10 * GIB,
        "utilisation": 50,
        "energy_j": 1000 + 360 * at,
        "nvlink_sent": 10 + at,
        "ecc_corrected": 7,
        "ecc_uncorrected": 1,
    }
    return GpuSample("GPU-a", 1000 + at, **{**how, **values})


def used(*told: GpuSample, held_s: float = 100.0) -> GpuUsage:
    usage = GpuUsage(held_s=held_s)
    for before, now in zip((None, *told), told, strict=False):
        usage.add(before, now)
    return usage


def test_a_run():
    usage = summary([used(sample(0), sample(50, memory_used=60 * GIB), sample(100))])
    assert usage == RunUsage(
        models={"H100": 1},
        gpu_hours=100 / 3600,
        utilisation=50.0,
        peak_memory=60 * GIB,
        memory_total=80 * GIB,
        energy_kwh=0.01,
        nvlink_bytes=100,
        problems=[],
    )
    text = (
        "GPUs: 1 x H100, 0.0278 GPU hours, mean utilisation 50 %, peak memory 60.00 GiB of "
        "80.00 GiB, energy 0.01 kWh, 100 B over NVLink"
    )
    assert usage.lines() == [text]
    assert RunUsage.from_json(json.loads(json.dumps(usage.to_json()))) == usage


def test_what_a_slice_does_not_tell():
    unknown = dict.fromkeys(
        (
            *("utilisation", "energy_j", "nvlink_sent", "memory_used"),
            *("ecc_corrected", "ecc_uncorrected", "index", "memory_total"),
        )
    )
    usage = summary([used(sample(0, **unknown), sample(100, **unknown))])
    assert usage.problems == []
    text = "mean utilisation unknown, peak memory unknown, energy unknown"
    assert usage.lines() == [f"GPUs: 1 x H100, 0.0278 GPU hours, {text}"]
    assert summary([]) is None
    assert summary([GpuUsage(held_s=3)]) is None


def test_what_was_wrong():
    now = {"ecc_uncorrected": 3, "ecc_corrected": 8}
    hot = used(
        sample(0),
        sample(50, held_back=["power cap"]),
        sample(51.5, held_back=["temperature (hardware)", "sync boost"]),
        sample(100, **now),
    )
    idle = [
        used(*(sample(at, utilisation=1, index=index) for at in (0, 100))) for index in range(1, 11)
    ]
    eight = ", ".join(f"n1 GPU {index}" for index in range(1, 9))
    assert summary([hot, *idle]).problems == [
        "clocks were held back by power cap, up to 50 % of the time: n1 GPU 0",
        "clocks were held back by temperature (hardware), up to 2 % of the time: n1 GPU 0",
        "2 uncorrected ECC errors of memory: n1 GPU 0",
        "1 corrected ECC error of memory: n1 GPU 0",
        f"idle, with a mean utilisation below 5 %: {eight} and 2 more",
    ]
    brief = [used(*(sample(at, utilisation=0) for at in (0, 5)))]
    assert summary(brief).problems == []
