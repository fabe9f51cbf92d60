"""`hpcdask stacks` of a run on GPUs: dead-locks made on purpose are named."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import deadlocks
from gpu_launching import WITH_TORCH
from hanging import Hanging, hanging_run
from hpcdask.gpu.devices import Gpu
from hpcdask.stacks.diagnose import diagnose
from running import no_launcher

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def whole(gpus: list[Gpu]) -> Iterator[Hanging]:
    """A run with a worker on each GPU."""
    with hanging_run(no_launcher(), len(gpus), "--nthreads", "2", device="cuda") as hanging:
        yield hanging


@pytest.fixture
def hanging(whole: Hanging) -> Iterator[Hanging]:
    yield whole
    whole.start_anew(len(whole.workers))


def test_a_device_that_is_full(hanging: Hanging):
    """The Dask task waits for room on it, and nobody makes any."""
    name = hanging.workers[0]
    task = hanging.client.submit(deadlocks.full_device, "f.there", workers=[name], pure=False)
    hanging.wait_until_there("f.there")
    report, text = hanging.look(likely=f"The GPU of worker {name} is full and idle")
    assert "full_device (" in text
    assert not report.unreached
    del task


@WITH_TORCH
def test_a_rank_that_never_comes_to_an_all_reduce_over_nccl(hanging: Hanging):
    size = len(hanging.workers)
    if size < 2:
        pytest.skip("a single GPU")
    with hanging.gang("nccl_barrier", size):
        report, text = hanging.look(likely=f"A gang of {size} is in a dead-lock: ")
        assert "come_to_all_reduce (" in diagnose(report)[0], text
        assert "nccl_barrier (" in diagnose(report)[0], text
        assert not report.unreached


def test_a_loop_in_c_that_holds_python_s_lock(hanging: Hanging):
    name = hanging.workers[0]
    task = hanging.client.submit(deadlocks.compiled, "c.there", workers=[name])
    hanging.wait_until_there("c.there")
    report, _ = hanging.look(likely=f"Worker {name} is in a loop of compiled code")
    assert f"(Dask task {task.key}" in diagnose(report)[0]
