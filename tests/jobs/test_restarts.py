"""Workers that die are started again; those that do not start are given up."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from distributed import Client, Scheduler, Security

from hpcdask.node import nanny
from hpcdask.node.nanny import BoundNanny, make_nanny
from hpcdask.node.placement import WorkerPlacement
from hpcdask.spec.specs import WorkerSpec
from launching import until

DEADLINE_S = 60
PAUSES_S = (0.01, 0.02, 0.03, 0.04)


async def nanny_of(scheduler: Scheduler, scratch: Path, preload: Path) -> BoundNanny:
    place = WorkerPlacement("a", None, (), 1, 0)
    spec = WorkerSpec(device="cpu", preload=[str(preload)], death_timeout=DEADLINE_S)
    return make_nanny(spec, place, scheduler.address, Security(), str(scratch))


@pytest.fixture
def preload(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A worker's preload, which fails or ends its process as often as `failures` has lines."""
    file = tmp_path / "preload.py"
    file.write_text(
        "import os, pathlib, signal\n"
        f"failures = pathlib.Path({str(tmp_path / 'failures')!r})\n"
        "def dask_setup(worker):\n"
        "    lines = failures.read_text().splitlines() if failures.exists() else []\n"
        "    first = lines.pop(0) if lines else ''\n"
        "    failures.write_text('\\n'.join(lines))\n"
        "    async def fail(): raise ValueError('no luck')\n"
        "    if first == 'raise': worker.get_metrics = fail\n"
        "    if first == 'kill': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    if first == 'realtime': os.kill(os.getpid(), signal.SIGRTMIN + 2)\n"
    )
    monkeypatch.setattr(nanny, "RESTART_PAUSES_S", PAUSES_S)
    return file


def start_of(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("hpcdask: ")]


async def killed_worker(scheduler: Scheduler, scratch: Path, preload: Path, failures: str):
    one = await nanny_of(scheduler, scratch, preload)
    await one
    (scratch / "failures").write_text(failures)
    os.kill(one.process.pid, signal.SIGKILL)
    return one


def run(body) -> None:
    async def main() -> None:
        async with Scheduler(host="127.0.0.1", dashboard=False, port=0) as scheduler:
            await body(scheduler)

    asyncio.run(main())


@pytest.mark.long
def test_a_worker_that_fails_to_start_again_gets_another_try(tmp_path, preload, capfd):
    async def body(scheduler: Scheduler) -> None:
        one = await killed_worker(scheduler, tmp_path, preload, "raise\nkill\n")
        first = one.worker_address
        await until(lambda: one.worker_address != first and len(scheduler.workers) == 1)
        async with Client(scheduler.address, asynchronous=True) as client:
            assert await client.submit(sum, [1, 2]) == 3
        await one.close()

    run(body)
    err = capfd.readouterr().err
    died, failed, killed = start_of(err)
    assert died == "hpcdask: worker a was killed by SIGKILL, and is replaced"
    assert failed == (
        "hpcdask: warning: worker a does not start again: ValueError: no luck; "
        "next attempt in 0.01 s"
    )
    assert "its process was killed by SIGKILL; next attempt in 0.02 s" in killed


def test_a_worker_that_never_starts_again_is_given_up(tmp_path, preload, capfd):
    async def body(scheduler: Scheduler) -> None:
        failures = "raise\n" * (len(PAUSES_S) + 4)
        one = await killed_worker(scheduler, tmp_path, preload, failures)
        async with asyncio.timeout(DEADLINE_S):
            await one.finished()
        assert not scheduler.workers
        assert (tmp_path / "failures").read_text().split() == ["raise"] * 3

    run(body)
    lines = start_of(capfd.readouterr().err)
    assert len(lines) == 2 + len(PAUSES_S)
    assert lines[-1] == (
        "hpcdask: warning: worker a does not start again: ValueError: no luck; given up"
    )


@pytest.mark.parametrize(
    ("failure", "told"), [("kill", "SIGKILL"), ("realtime", f"signal {signal.SIGRTMIN + 2}")]
)
def test_a_worker_that_is_killed_while_it_starts_tells_the_signal(tmp_path, preload, failure, told):
    async def body(scheduler: Scheduler) -> None:
        (tmp_path / "failures").write_text(f"{failure}\n")
        one = await nanny_of(scheduler, tmp_path, preload)
        with pytest.raises(Exception, match="failed to start") as caught:
            await one
        said = f"its process was killed by {told} while it started"
        assert said in str(caught.value.__cause__)

    run(body)
