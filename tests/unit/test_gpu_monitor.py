"""GPUs from a worker's NVML, of which there is a stand-in here, to whoever wants to see them."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from distributed import Client, Scheduler, Worker

import hpcdask
from hpcdask.bench import gpus
from hpcdask.bootstrap.orders import MessageStream
from hpcdask.clusters import display
from hpcdask.clusters.display import JobTable
from hpcdask.errors import UsageError
from hpcdask.gpu import monitor as monitoring
from hpcdask.gpu import samples
from hpcdask.gpu.monitor import GpuMonitor, monitor_of, usage_lines
from hpcdask.gpu.reporting import GpuReporter
from hpcdask.gpu.table import GpuTable
from hpcdask.runner import protocol, scheduler_process
from hpcdask.runner import scheduler as scheduler_main
from hpcdask.runner.protocol import Events
from hpcdask.runner.scheduler_process import SchedulerProcess
from launching import until

FAKES = str(Path(__file__).parents[1] / "fakes")
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
def nvml(monkeypatch, tmp_path):
    """Writes what the stand-in tells from now on; here that is two busy GPUs and a slice."""
    file = tmp_path / "nvml.json"
    monkeypatch.setenv("FAKE_NVML", str(file))
    monkeypatch.syspath_prepend(FAKES)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)

    def write(gpus: list) -> None:
        part = file.with_suffix(".part")
        part.write_text(json.dumps(gpus))
        part.replace(file)

    write(NODE)
    for module in (samples, monitoring):
        monkeypatch.setattr(module, "INTERVAL_S", 0.1)
    monkeypatch.setattr(monitoring, "READ_DEADLINE_S", 30)  # figures are exact on a busy machine
    yield write
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)


@asynccontextmanager
async def cluster(*uuids: str | None) -> AsyncIterator[tuple[Scheduler, list[Worker]]]:
    """A scheduler with a monitor, and workers that say that they have these GPUs."""
    scheduler = Scheduler(dashboard=False, **LOCAL)
    scheduler.add_plugin(GpuMonitor(scheduler))
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
        lambda: len(GpuTable.of(scheduler)) == count and monitor_of(scheduler).usage(),
        30,
        "samples",
    )
    return monitor_of(scheduler)


def test_from_nvml_to_the_table(nvml):
    async def run() -> None:
        async with cluster("GPU-a", "GPU-b", "MIG-c", None) as (scheduler, _):
            monitor = await sampled(scheduler, 3)
            nvml([{**NODE[0], "now": {**NOW, "energy": 9_360_000}}, *NODE[1:]])
            await monitor.refresh()
            table = GpuTable.of(scheduler)
            by = {one.sample.uuid: one for one in table}
            assert by["GPU-a"].worker == "w0"
            assert by["GPU-b"].worker == "w1"
            assert by["GPU-a"].sample.energy_j == 9360
            lines = repr(table).splitlines()
            assert len(lines) == 4
            assert "350 W" in repr(table)
            assert "power cap" in repr(table)
            (mig,) = (line for line in lines if "MIG-c" in line)
            assert mig.count("unknown") >= 6
            assert "<th style='text-align: left'>utilisation</th>" in table._repr_html_()
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
            table = GpuTable.of(scheduler)
            assert [one.worker for one in table] == ["w0, w2", "w1"]
            await workers[0].close()
            await workers[1].close()
            await until(lambda: GpuTable.of(scheduler)[0].worker == "w2", 30, "its samples")
            assert len(GpuTable.of(scheduler)) == 1
            assert monitor_of(scheduler).usage().models == {"NVIDIA H100": 2}, "what was used stays"

    asyncio.run(run())


@asynccontextmanager
async def held_by_the_rank(
    theirs: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[SchedulerProcess]:
    """What rank 0 has of the scheduler's process, which is at the other end of a socket here."""
    process = SimpleNamespace(start=lambda: None)
    pair = theirs, SimpleNamespace(close=lambda: None)
    with monkeypatch.context() as patch:
        patch.setattr(scheduler_process.CONTEXT, "Process", lambda **options: process)
        patch.setattr(scheduler_process.socket, "socketpair", lambda: pair)
        held = SchedulerProcess(Events())
    await held.open()
    listening = asyncio.create_task(held.listen())
    yield held
    listening.cancel()


def test_the_rank_hears_what_the_gpus_did(nvml, monkeypatch):
    monkeypatch.setattr(scheduler_main, "set_log_level", lambda level: None)
    monkeypatch.setattr(scheduler_process, "USAGE_DEADLINE_S", 60)  # the machine may be busy

    async def run() -> None:
        ours, theirs = socket.socketpair()
        async with (
            cluster("GPU-a") as (scheduler, _),
            held_by_the_rank(theirs, monkeypatch) as held,
        ):
            await sampled(scheduler, 1)
            channel = await MessageStream.over(ours)
            obeying = asyncio.create_task(scheduler_main._obey(scheduler, channel))
            lines = await held.gpu_usage()
            assert lines[0].startswith("GPUs: 1 x NVIDIA H100, ")
            channel.send(**protocol.GpuUsageTold([]).to_json())  # what it says at its own end
            assert await held.gpu_usage() == lines
            obeying.cancel()
            channel.close()

    asyncio.run(run())


def test_a_scheduler_that_does_not_answer_delays_the_end_for_a_moment_only(monkeypatch):
    monkeypatch.setattr(scheduler_process, "USAGE_DEADLINE_S", 0.05)

    async def run() -> None:
        ours, theirs = socket.socketpair()
        async with held_by_the_rank(theirs, monkeypatch) as held:
            assert await held.gpu_usage() == []
            ours.close()
            await asyncio.wait_for(held._usage_told.wait(), 60)

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


def test_gpus_of_a_client(nvml):
    async def run() -> None:
        async with (
            cluster("GPU-a") as (scheduler, _),
            Client(scheduler.address, asynchronous=True) as client,
        ):
            await sampled(scheduler, 1)
            table = await hpcdask.gpus(client)
            assert isinstance(table, GpuTable)
            assert [one.sample.uuid for one in table] == ["GPU-a"]

    asyncio.run(run())


def test_gpus_without_a_client():
    with pytest.raises(UsageError, match="connect one first"):
        hpcdask.gpus()


def test_the_widget():
    assert display.html(JobTable(), GpuTable(), None) == ""
    assert repr(GpuTable()) == "no GPU was sampled"
    sample = monitoring.GpuSample(
        "GPU-a", 1.0, "n1", 0, "NVIDIA H100", 80, 20 * GIB, 80 * GIB, power_w=300.0
    )
    state = monitoring.GpuState(sample, "w<0>")
    shown = display.html(JobTable(), GpuTable([state]), None)
    summary = "1 x NVIDIA H100, memory 20.00 GiB of 80.00 GiB, utilisation 80 %"
    assert f"<strong>GPUs:</strong> {summary}" in shown
    assert "w&lt;0&gt;" in shown


def test_a_workload_of_the_bench(nvml):
    async def run() -> None:
        async with cluster("GPU-a") as (scheduler, _):
            await sampled(scheduler, 1)
            await gpus._start(scheduler)
            nvml([{**NODE[0], "now": {**NOW, "energy": 12_600_000}}])
            found = json.loads(json.dumps(await gpus._stop(scheduler)))
            assert found["energy_kwh"] == pytest.approx(0.001)
            assert found["models"] == {"NVIDIA H100": 1}
        async with cluster(None) as (scheduler, _):
            await gpus._start(scheduler)
            assert await gpus._stop(scheduler) == {}

    asyncio.run(run())
