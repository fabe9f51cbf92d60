"""GPUs from a worker's NVML, of which there is a stand-in here, to whoever wants to see them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from distributed import Client, Scheduler, Worker
from distributed.core import Status
from tornado.httpclient import AsyncHTTPClient, HTTPRequest, HTTPResponse

import browser
import hpcdask
from hpcdask.bench import gpus
from hpcdask.clusters import display
from hpcdask.clusters.display import JobTable
from hpcdask.comm.peers import PeerWorker
from hpcdask.errors import UsageError
from hpcdask.gpu import monitor as monitoring
from hpcdask.gpu import reporting, samples
from hpcdask.gpu.monitor import GpuMonitor, Moment, assign
from hpcdask.gpu.reporting import METRIC, GpuReporter, expect_gpus, monitor_of, usage_lines
from hpcdask.gpu.table import GpuTable
from hpcdask.node.channel import MessageStream
from hpcdask.node.device_worker import DeviceWorker
from hpcdask.runner import protocol, scheduler_process
from hpcdask.runner import scheduler as scheduler_main
from hpcdask.runner.events import Events
from hpcdask.runner.scheduler_process import SchedulerProcess
from hpcdask.security import webserver
from launching import needs, until

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
    """A scheduler as ours are, and workers that say that they have these GPUs."""
    with webserver.without_proxy():
        scheduler = Scheduler(dashboard=False, **LOCAL)
    webserver.guard(scheduler)
    webserver.add_lazy_dashboard(scheduler)
    expect_gpus(scheduler)
    async with scheduler, AsyncExitStack() as stack:
        workers = []
        for number, uuid in enumerate(uuids):
            worker = Worker(scheduler.address, name=f"w{number}", dashboard=False)
            reporter = None if uuid is None else GpuReporter(worker, uuid)
            workers.append(await stack.enter_async_context(worker))
            if reporter is not None:
                stack.callback(reporter.stop)
                reporter.announce()
        yield scheduler, workers


async def sampled(scheduler: Scheduler, count: int) -> GpuMonitor:
    """Wait until so many GPUs were sampled."""
    await until(
        lambda: len(GpuTable.of(scheduler)) == count and monitor_of(scheduler).usage(),
        30,
        "samples",
    )
    return monitor_of(scheduler)


async def ask(scheduler: Scheduler, path: str, **options: object) -> HTTPResponse:
    url = f"http://127.0.0.1:{scheduler.http_server.port}{path}"
    request = HTTPRequest(url, request_timeout=60, **options)
    return await AsyncHTTPClient().fetch(request, raise_error=False)


def test_one_worker_of_a_node_samples_all_that_it_sees():
    uuids = {"w0": "a", "w1": "b", "w2": "c", "w3": "d", "w4": "d"}
    hosts = dict.fromkeys(("w0", "w1", "w2"), "n1") | {"w3": "n2", "w4": "n2"}
    assert assign(uuids, hosts, ()) == {"w0": ["a", "b", "c"], "w3": ["d"]}
    confined = {("w0", "b"), ("w0", "c")}
    assert assign(uuids, hosts, confined) == {"w0": ["a"], "w1": ["b"], "w2": ["c"], "w3": ["d"]}
    assert assign({}, {}, ()) == {}


def test_a_worker_tells_of_its_gpu_before_it_gets_warm(monkeypatch):
    """GPU hours count from there, and warming may take long."""
    told = []

    async def warm(_worker: PeerWorker) -> None:
        told.append("warm")

    monkeypatch.setattr(PeerWorker, "_warm", warm)
    worker = object.__new__(DeviceWorker)
    worker._status = Status.running
    worker.on_device = True
    worker._reporter = SimpleNamespace(announce=lambda: told.append("GPU"))
    worker._first_use = SimpleNamespace(start=lambda: told.append("first use"))
    asyncio.run(worker._warm())
    assert told == ["GPU", "warm", "first use"]


def test_from_nvml_to_the_table(nvml):
    async def run() -> None:
        async with cluster("GPU-a", "GPU-b", "MIG-c", None) as (scheduler, workers):
            monitor = await sampled(scheduler, 3)
            sampling = [w for w in workers if (await w.get_metrics()).get(METRIC)]
            assert sampling == workers[:1], "one place on a node"
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
            (moments,) = monitor.past().values()
            assert moments[-1].utilisation == 80
            assert moments[-1].memory == 20 * GIB

    asyncio.run(run())


def test_another_worker_samples_when_one_is_gone(nvml):
    async def run() -> None:
        async with cluster("GPU-a", "GPU-b") as (scheduler, workers):
            await sampled(scheduler, 2)
            await workers[0].close()
            await until(lambda: len(GpuTable.of(scheduler)) == 1, 30, "one GPU")
            before = GpuTable.of(scheduler)[0].sample.time
            await until(lambda: GpuTable.of(scheduler)[0].sample.time > before, 30, "samples")
            monitor = monitor_of(scheduler)
            assert monitor.usage().models == {"NVIDIA H100": 2}, "what was used stays"

    asyncio.run(run())


def test_what_a_worker_does_not_see_is_sampled_by_its_own(nvml, monkeypatch):
    """Two jobs of one node, each confined to its own GPU."""
    asked: list[tuple[str, list[str]]] = []
    send = Scheduler.worker_send

    def spy(scheduler: Scheduler, worker: str, msg: dict) -> None:
        if msg["op"] == reporting.SAMPLE:
            asked.append((str(scheduler.workers[worker].name), list(msg["uuids"])))
        send(scheduler, worker, msg)

    async def run() -> None:
        monkeypatch.setattr(Scheduler, "worker_send", spy)
        hidden = {**NODE[1], "forbidden": True}
        nvml([NODE[0], hidden])
        async with cluster("GPU-a", "GPU-b") as (scheduler, _):
            await until(lambda: len(asked) >= 3, 30, "another plan")
            assert asked[0] == ("w0", ["GPU-a", "GPU-b"])
            assert sorted(asked[1:3]) == [("w0", ["GPU-a"]), ("w1", ["GPU-b"])]
            await sampled(scheduler, 1)

    asyncio.run(run())


@asynccontextmanager
async def held_by_the_rank(theirs: socket.socket) -> AsyncIterator[SchedulerProcess]:
    """What rank 0 has of the scheduler's process, which is at the other end of a socket here."""
    process = SimpleNamespace(channel=lambda: MessageStream.over(theirs))
    held = SchedulerProcess(process, Events(), lambda found: None)
    await held.open()
    listening = asyncio.create_task(held.listen())
    yield held
    listening.cancel()


def test_the_rank_hears_what_the_gpus_did(nvml, monkeypatch):
    monkeypatch.setattr(scheduler_main, "set_log_level", lambda level: None)
    monkeypatch.setattr(scheduler_process, "USAGE_DEADLINE_S", 60)  # the machine may be busy

    async def run() -> None:
        ours, theirs = socket.socketpair()
        async with cluster("GPU-a") as (scheduler, _), held_by_the_rank(theirs) as held:
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
        async with held_by_the_rank(theirs) as held:
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
            assert monitor_of(scheduler) is None
            assert usage_lines(scheduler) == []
            page = (await ask(scheduler, "/status", follow_redirects=True)).body.decode()
            assert "gpus" not in page.lower()
            assert (await ask(scheduler, "/gpus")).code == 404

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


@pytest.mark.slow
@pytest.mark.parametrize("looks_first", [True, False])
def test_the_page_is_there_once_there_are_gpus(nvml, looks_first: bool):
    from bokeh.document import Document

    from hpcdask.gpu import page

    async def run() -> None:
        async with cluster() as (scheduler, _):
            if looks_first:
                await ask(scheduler, "/status", follow_redirects=True)
            async with Worker(scheduler.address, dashboard=False) as worker:
                reporter = GpuReporter(worker, "GPU-a")
                reporter.announce()
                await sampled(scheduler, 1)
                answer = await ask(scheduler, "/gpus", follow_redirects=True)
                assert answer.code == 200, answer.body
                drawn = Document()
                page.document(scheduler, {}, drawn)
                assert drawn.title == "Dask: GPUs"
                (series,) = drawn.components
                labels = [source.data["name"] for source in series.sources.values()]
                assert labels == [[GpuTable.of(scheduler)[0].sample.label]] * 4
                assert series.sources["power"].data["y"][0][-1] == 350
                status = await ask(scheduler, "/status", follow_redirects=True)
                assert b'href="gpus"' in status.body
                told = json.loads((await ask(scheduler, "/sitemap.json")).body)
                assert "/gpus" in told["paths"]
                reporter.stop()

    asyncio.run(run())


#: True once all charts show two GPUs, none of them beyond the screen.
DRAWN = """
[...(window.Bokeh?.documents[0]?._all_models?.values() ?? [])].filter(
  one => one.data?.x?.length == 2 && one.data.x[0].length > 1
).length == 4 && document.documentElement.scrollWidth <= innerWidth && innerWidth == %d
"""


@pytest.mark.slow
def test_the_page_in_a_browser(nvml, tmp_path):
    """With HPCDASK_SHOTS set to a folder, the pictures stay."""
    from hpcdask.gpu import page

    async def run() -> None:
        async with cluster("GPU-a", "GPU-b") as (scheduler, _):
            await sampled(scheduler, 2)
            url = f"http://127.0.0.1:{scheduler.http_server.port}/gpus"
            for width, height in ((390, 844), (800, 600), (1280, 760)):
                given = (tmp_path, url, DRAWN % width, (width, height))
                taken = await asyncio.to_thread(browser.watch, *given)
                assert len(taken) > 20_000  # an empty page has 4 kB
                if folder := os.environ.get("HPCDASK_SHOTS"):
                    picture = Path(folder, f"gpus-{width}.png")
                    await asyncio.to_thread(picture.write_bytes, taken)
            axes = [one.xaxis[0] for one, *_ in page.GpuTimeSeries(scheduler).root.children]
            assert all(len(axis.ticker.ticks) == 4 for axis in axes)  # they ran into each other

    asyncio.run(run())


def test_what_the_page_draws():
    from hpcdask.gpu import page

    past = {"n1 GPU 0": [Moment(100.0, 50, 7, 300.0, None), Moment(101.0, 70, 8, None, 5.0)]}
    assert page.lines(past, "utilisation", 105.0) == {
        "name": ["n1 GPU 0"],
        "x": [[-5.0, -4.0]],
        "y": [[50, 70]],
        "color": [page.Category20[20][0]],
    }
    assert page.lines(past, "power", 105.0)["y"] == [[300.0]]
    many = {
        f"n{node} GPU {index}": [Moment(100.0 + index / 100, 10 * index, None, 1.0, None)]
        for node in range(10)
        for index in range(4)
    }
    means = page.of_nodes(many)
    drawn = page.lines(means, "utilisation", 100.0)
    assert drawn["name"] == [f"n{node}" for node in range(10)]
    assert drawn["y"] == [[15.0]] * 10
    assert page.lines(means, "memory", 100.0)["y"] == [[]] * 10
    second = many["n0 GPU 0"][0]
    long = {label: [second._replace(time=float(at)) for at in range(300)] for label in many}
    assert {len(one) for one in page.of_nodes(long).values()} == {300 // page.APART_S}


@needs("prometheus_client")
def test_metrics_have_the_names_of_dcgm(nvml):
    async def run() -> None:
        async with cluster("GPU-a", "MIG-c") as (scheduler, _):
            await sampled(scheduler, 2)
            answer = await ask(scheduler, "/metrics")
            assert answer.code == 200
            text = answer.body.decode()
            rows = [line for line in text.splitlines() if 'UUID="GPU-a"' in line]
            found = {row.partition("{")[0]: float(row.rpartition(" ")[2]) for row in rows}
            assert found == {
                "DCGM_FI_DEV_GPU_UTIL": 80,
                "DCGM_FI_DEV_SM_CLOCK": 1755,
                "DCGM_FI_DEV_MEM_CLOCK": 2619,
                "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": 0x4,
                "DCGM_FI_DEV_GPU_TEMP": 61,
                "DCGM_FI_DEV_POWER_USAGE": 350,
                "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": 9_000_000,
                "DCGM_FI_DEV_FB_USED": 20 * 1024,
                "DCGM_FI_DEV_FB_FREE": 60 * 1024,
                "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL": 5000 * 1024 / 1000,
                "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": 0,
                "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": 2,
            }
            assert 'gpu="0"' in rows[0]
            assert 'modelName="NVIDIA H100"' in rows[0]
            assert 'UUID="MIG-c"' in text
            assert 'GPU_UTIL{gpu="",UUID="MIG-c"' not in text

    asyncio.run(run())


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


NOTHING = """
import hpcdask
from distributed import Client

def loaded():
    import sys
    names = ("samples", "monitor", "usage", "page", "metrics")
    return [name for name in names if f"hpcdask.gpu.{name}" in sys.modules]

client = Client()
found = [client.run_on_scheduler(loaded), *client.run(loaded).values(), *hpcdask.gpus()]
print(any(found))
"""


@pytest.mark.slow
def test_a_run_on_the_cpu_loads_and_says_nothing_of_it(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(NOTHING)
    done = subprocess.run(
        [sys.executable, "-m", "hpcdask.run", "--device", "cpu", str(script)],
        capture_output=True,
        text=True,
        timeout=300,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "False\n"
    assert "GPU" not in done.stderr
