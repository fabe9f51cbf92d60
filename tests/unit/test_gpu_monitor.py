"""GPUs from a worker's NVML (the stand-in of tests/fakes) to the table and the sums of a run."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from distributed import Client, Scheduler, Worker

import hpcdask
from hpcdask.gpu import monitor as monitoring
from hpcdask.gpu import samples
from hpcdask.gpu.monitor import GpuMonitor, GpuTable, monitor_of, usage_lines
from hpcdask.gpu.samples import GpuState, read_gpu, report_gpu
from hpcdask.gpu.usage import GpuUsage, RunUsage, summary
from launching import until

LOCAL = {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0"}
GIB = 2**30
NOW = {
    "utilisation": 80,
    "used": 20 * GIB,
    "power": 350_250,
    "energy": 9_000_000,
    "reasons": 0x4 | 0x1,
    "clock": 1755,
    "temperature": 61,
    "fields": {"3:0": 0, "4:0": 2, "138:4294967295": 2000, "139:4294967295": 30},
}
SLICE = {"uuid": "MIG-c", "name": "H100 MIG", "now": {"used": GIB}}
NODE = [
    {"uuid": "GPU-a", "name": "NVIDIA H100", "now": NOW},
    {"uuid": "GPU-b", "name": "NVIDIA H100", "now": {**NOW, "utilisation": 40}},
    {"uuid": "GPU-c", "name": "NVIDIA H100", "mig": [SLICE]},
    {"uuid": "GPU-d", "forbidden": True},
]


@pytest.fixture
def nvml(nvml, monkeypatch):
    """NVML's stand-in, which tells of two busy GPUs and a slice at first."""
    nvml(NODE)
    for module in (samples, monitoring):
        monkeypatch.setattr(module, "INTERVAL_S", 0.1)
    monkeypatch.setattr(monitoring, "READ_DEADLINE_S", 30)  # figures are exact on a busy machine
    return nvml


def test_a_sample_has_what_nvml_tells(nvml):
    sample = read_gpu("GPU-a")
    assert sample == GpuState(
        uuid="GPU-a",
        time=sample.time,
        host=sample.host,
        index=0,
        model="NVIDIA H100",
        utilisation=80,
        memory_used=20 * GIB,
        memory_total=80 * GIB,
        power_w=350.25,
        energy_j=9000.0,
        clock_mhz=1755,
        held_back=["power cap"],
        temperature_c=61,
        nvlink_sent=2000 * 1024,
        nvlink_received=30 * 1024,
        ecc_corrected=0,
        ecc_uncorrected=2,
    )
    assert sample.label == f"{sample.host} GPU 0"
    assert GpuState.from_json(json.loads(json.dumps(sample.to_json()))) == sample
    of_slice = read_gpu("MIG-c")
    known = {"model": "H100 MIG", "memory_used": GIB, "memory_total": 80 * GIB}
    assert of_slice == GpuState("MIG-c", of_slice.time, sample.host, **known)
    assert of_slice.label == f"{sample.host} GPU MIG-c"


@pytest.mark.parametrize("uuid", ["GPU-d", "GPU-nowhere", "without a driver"])
def test_a_gpu_that_nvml_does_not_show_has_no_sample(nvml, monkeypatch, uuid):
    if uuid == "without a driver":
        monkeypatch.delenv("FAKE_NVML")
    assert read_gpu(uuid) is None


@asynccontextmanager
async def cluster(*uuids: str | None) -> AsyncIterator[tuple[Scheduler, list[Worker]]]:
    """A scheduler with a monitor and samples of GPUs, and workers that have these GPUs."""
    scheduler = Scheduler(dashboard=False, **LOCAL)
    scheduler.add_plugin(GpuMonitor())
    async with scheduler, AsyncExitStack() as stack:
        workers = []
        for number, uuid in enumerate(uuids):
            worker = Worker(scheduler.address, name=f"w{number}", dashboard=False)
            if uuid is not None:
                report_gpu(worker, uuid)
            workers.append(await stack.enter_async_context(worker))
        count = len({*uuids} - {None})
        await until(lambda: len(monitor_of(scheduler).table()) == count, 30, "samples")
        yield scheduler, workers


def test_from_nvml_to_the_table(nvml):
    async def run() -> None:
        async with (
            cluster("GPU-a", "GPU-b", "MIG-c", None) as (scheduler, _),
            Client(scheduler.address, asynchronous=True) as client,
        ):
            nvml([{**NODE[0], "now": {**NOW, "energy": 9_360_000}}, *NODE[1:]])
            await monitor_of(scheduler).refresh()
            table = await hpcdask.gpus(client)
            assert isinstance(table, GpuTable)
            of = {one.uuid: one for one in table}
            assert {uuid: of[uuid].worker for uuid in of} == {
                "GPU-a": "w0",
                "GPU-b": "w1",
                "MIG-c": "w2",
            }
            assert of["GPU-a"].energy_j == 9360
            head, first, _, of_slice = repr(table).splitlines()
            assert head.startswith("node")
            assert "350 W" in first
            assert "power cap" in first
            assert of_slice.count("unknown") >= 6
            assert "<td style='text-align: left'>350 W</td>" in table._repr_html_()
            assert table.summary() == (
                "2 x NVIDIA H100, 1 x H100 MIG, memory 41.00 GiB of 240.00 GiB, utilisation 60 %"
            )
            line, *problems = usage_lines(scheduler)
            assert line.startswith("GPUs: 2 x NVIDIA H100, 1 x H100 MIG, ")
            assert "energy unknown" in line
            assert problems[0].startswith("warning: clocks were held back by power cap, up to 100")

    asyncio.run(run())


def test_energy_and_nvlink_of_a_run_and_of_a_part(nvml):
    async def run() -> None:
        async with cluster("GPU-a") as (scheduler, _):
            monitor = monitor_of(scheduler)
            more = {**NOW["fields"], "138:4294967295": 3000}
            nvml([{**NODE[0], "now": {**NOW, "energy": 12_600_000, "fields": more}}])
            await monitor.start_lap()
            nvml([{**NODE[0], "now": {**NOW, "energy": 16_200_000, "fields": more}}])
            lap, usage = await monitor.lap(), monitor.usage()
            assert lap.energy_kwh == pytest.approx(0.001)
            assert usage.energy_kwh == pytest.approx(0.002)
            assert (lap.nvlink_bytes, usage.nvlink_bytes) == (0, 1000 * 1024)
            assert 0 < lap.gpu_hours < usage.gpu_hours

    asyncio.run(run())


def test_two_workers_share_a_gpu_and_one_is_gone(nvml):
    async def run() -> None:
        async with cluster("GPU-a", "GPU-b", "GPU-a") as (scheduler, workers):
            table = monitor_of(scheduler).table
            assert [one.worker for one in table()] == ["w0, w2", "w1"]
            await workers[0].close()
            await workers[1].close()
            await until(lambda: [one.worker for one in table()] == ["w2"], 30, "its samples")
            assert monitor_of(scheduler).usage().models == {"NVIDIA H100": 2}, "what was used stays"

    asyncio.run(run())


def test_a_cluster_without_gpus_has_nothing_of_it():
    async def run() -> None:
        async with (
            cluster(None) as (scheduler, _),
            Client(scheduler.address, asynchronous=True) as client,
        ):
            assert await hpcdask.gpus(client) == ()
            assert usage_lines(scheduler) == []

    asyncio.run(run())


def test_gpus_without_a_client():
    with pytest.raises(ValueError, match="No clients found"):
        hpcdask.gpus()


# Sums over a run


def used(*told: dict[str, object]) -> GpuUsage:
    """The sums over these samples of a GPU, which is busy for half of the time."""
    usage, before = GpuUsage(), None
    for values in told:
        at = values["at"]
        how = {"index": 0, "model": "H100", "memory_total": 80 * GIB, "memory_used": 10 * GIB}
        how |= {"utilisation": 50, "energy_j": 1000 + 360 * at, "nvlink_sent": 10 + at}
        how |= {"ecc_corrected": 7, "ecc_uncorrected": 1, **values}
        del how["at"]
        now = GpuState("GPU-a", 1000 + at, "n1", **how)
        usage.add(before, now)
        before = now
    return usage


def test_a_run():
    usage = summary([used({"at": 0}, {"at": 50, "memory_used": 60 * GIB}, {"at": 100})])
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


def test_what_a_slice_does_not_tell_is_unknown():
    names = "utilisation energy_j nvlink_sent memory_used ecc_corrected ecc_uncorrected index"
    unknown = dict.fromkeys([*names.split(), "memory_total"])
    usage = summary([used({"at": 0, **unknown}, {"at": 100, **unknown})])
    text = "mean utilisation unknown, peak memory unknown, energy unknown"
    assert usage.lines() == [f"GPUs: 1 x H100, 0.0278 GPU hours, {text}"]
    assert summary([]) is None


def test_a_counter_that_was_not_told_for_a_moment_does_not_count_from_the_driver_s_start():
    usage = summary([used({"at": 0}, {"at": 50, "energy_j": None}, {"at": 100})])
    assert usage.energy_kwh == 0


def test_what_was_wrong():
    hot = used(
        {"at": 0},
        {"at": 50, "held_back": ["power cap"]},
        {"at": 51.5, "held_back": ["temperature (hardware)", "sync boost"]},
        {"at": 100, "ecc_uncorrected": 3, "ecc_corrected": 8},
    )
    idle = [
        used(*({"at": at, "utilisation": 1, "index": index} for at in (0, 100)))
        for index in range(1, 11)
    ]
    five = ", ".join(f"n1 GPU {index}" for index in range(1, 6))
    assert summary([hot, *idle]).problems == [
        "clocks were held back by power cap, up to 50 % of the time: n1 GPU 0",
        "clocks were held back by temperature (hardware), up to 2 % of the time: n1 GPU 0",
        "2 uncorrected ECC errors of memory: n1 GPU 0",
        "1 corrected ECC error of memory: n1 GPU 0",
        f"idle, with a mean utilisation below 5 %: {five} and 5 more",
    ]
    brief = [used(*({"at": at, "utilisation": 0} for at in (0, 5)))]
    assert summary(brief).problems == []
