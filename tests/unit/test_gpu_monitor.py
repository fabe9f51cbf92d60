"""GPUs from a worker's NVML, of which there is a stand-in here, to whoever wants to see them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from distributed import Client, Scheduler, Worker

import hpcdask
from hpcdask.errors import UsageError
from hpcdask.gpu import monitor as monitoring
from hpcdask.gpu import samples
from hpcdask.gpu.monitor import GpuMonitor, GpuTable, monitor_of, usage_lines
from hpcdask.gpu.samples import GpuReporter
from launching import until

LOCAL = {"host": "127.0.0.1", "port": 0, "dashboard_address": "127.0.0.1:0"}
GIB = 2**30
NOW = {
    "utilisation": 80,
    "used": 20 * GIB,
    "power": 350_000,
    "energy": 9_000_000,
    "reasons": 0x4,
    "clock": 1755,
    "temperature": 61,
    "fields": {"3:0": 0, "4:0": 2, "138:4294967295": 2000, "139:4294967295": 3000},
}
NODE = [
    {"uuid": "GPU-a", "name": "NVIDIA H100", "now": NOW},
    {"uuid": "GPU-b", "name": "NVIDIA H100", "now": {**NOW, "utilisation": 40}},
    {"uuid": "GPU-c", "name": "NVIDIA H100", "mig": [{"uuid": "MIG-c", "name": "H100 MIG"}]},
]


@pytest.fixture
def nvml(nvml, monkeypatch):
    """NVML's stand-in, which tells of two busy GPUs and a slice at first."""
    nvml(NODE)
    for module in (samples, monitoring):
        monkeypatch.setattr(module, "INTERVAL_S", 0.1)
    monkeypatch.setattr(monitoring, "READ_DEADLINE_S", 30)  # figures are exact on a busy machine
    return nvml


@asynccontextmanager
async def cluster(*uuids: str | None) -> AsyncIterator[tuple[Scheduler, list[Worker]]]:
    """A scheduler with a monitor, and workers that say that they have these GPUs."""
    scheduler = Scheduler(dashboard=False, **LOCAL)
    scheduler.add_plugin(GpuMonitor())
    async with scheduler, AsyncExitStack() as stack:
        workers = []
        for number, uuid in enumerate(uuids):
            worker = Worker(scheduler.address, name=f"w{number}", dashboard=False)
            reporter = None if uuid is None else GpuReporter(worker, uuid)
            workers.append(await stack.enter_async_context(worker))
            if reporter is not None:
                stack.callback(reporter.stop)
                reporter.start()
        yield scheduler, workers


async def sampled(scheduler: Scheduler, count: int) -> GpuMonitor:
    """Wait until so many GPUs were sampled."""
    await until(
        lambda: len(monitor_of(scheduler).table()) == count and monitor_of(scheduler).usage(),
        30,
        "samples",
    )
    return monitor_of(scheduler)


def test_from_nvml_to_the_table(nvml):
    async def run() -> None:
        async with (
            cluster("GPU-a", "GPU-b", "MIG-c", None) as (scheduler, _),
            Client(scheduler.address, asynchronous=True) as client,
        ):
            monitor = await sampled(scheduler, 3)
            nvml([{**NODE[0], "now": {**NOW, "energy": 9_360_000}}, *NODE[1:]])
            await monitor.refresh()
            table = monitor_of(scheduler).table()
            by = {one.sample.uuid: one for one in table}
            fetched = await hpcdask.gpus(client)
            assert isinstance(fetched, GpuTable)
            assert {one.sample.uuid for one in fetched} == set(by)
            assert by["GPU-a"].worker == "w0"
            assert by["GPU-b"].worker == "w1"
            assert by["GPU-a"].sample.energy_j == 9360
            lines = repr(table).splitlines()
            assert len(lines) == 4
            assert "350 W" in repr(table)
            assert "power cap" in repr(table)
            (mig,) = (line for line in lines if "MIG-c" in line)
            assert mig.count("unknown") >= 6
            assert "40.00 GiB of" in table.summary()
            assert "utilisation 60 %" in table.summary()
            line, *problems = usage_lines(scheduler)
            assert line.startswith("GPUs: 2 x NVIDIA H100, 1 x H100 MIG, ")
            assert "energy unknown" in line
            assert problems[0].startswith("warning: clocks were held back by power cap, up to 100")

    asyncio.run(run())


def test_energy_and_nvlink_of_a_run_and_of_a_part(nvml):
    async def run() -> None:
        async with cluster("GPU-a") as (scheduler, _):
            monitor = await sampled(scheduler, 1)
            more = {**NOW["fields"], "138:4294967295": 3000}
            nvml([{**NODE[0], "now": {**NOW, "energy": 12_600_000, "fields": more}}])
            await monitor.start_lap()
            nvml([{**NODE[0], "now": {**NOW, "energy": 16_200_000, "fields": more}}])
            lap, usage = await monitor.lap(), monitor.usage()
            assert lap.energy_kwh == pytest.approx(0.001)
            assert usage.energy_kwh == pytest.approx(0.002)
            assert (lap.nvlink_bytes, usage.nvlink_bytes) == (0, 1000 * 1024)
            assert 0 < lap.gpu_hours < usage.gpu_hours
            assert usage.models == {"NVIDIA H100": 1}

    asyncio.run(run())


def test_two_workers_share_a_gpu_and_one_is_gone(nvml):
    async def run() -> None:
        async with cluster("GPU-a", "GPU-b", "GPU-a") as (scheduler, workers):
            await sampled(scheduler, 2)
            table = monitor_of(scheduler).table()
            assert [one.worker for one in table] == ["w0, w2", "w1"]
            await workers[0].close()
            await workers[1].close()
            await until(lambda: monitor_of(scheduler).table()[0].worker == "w2", 30, "its samples")
            assert len(monitor_of(scheduler).table()) == 1
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
    with pytest.raises(UsageError, match="connect one first"):
        hpcdask.gpus()
