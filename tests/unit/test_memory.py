"""Device memory: who gets how much, what is refused, and a worker that outlives running out of it.

There is no device here: `Block` stands in for arrays on one, and `Rmm` for RMM.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import re
import sys
import traceback
import weakref
from collections.abc import Collection
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import zict
from dask.sizeof import sizeof
from distributed import Client, LocalCluster, Worker, wait

from hpcdask.errors import DeviceError, HpcdaskError, UsageError
from hpcdask.gpu import memory, oom
from hpcdask.gpu.devices import Gpu
from hpcdask.gpu.memory import MemoryPlan, plan
from hpcdask.gpu.oom import DeviceMemoryError
from hpcdask.spec.specs import WorkerSpec
from launching import needs

GIB = 1 << 30
H200 = Gpu("GPU-4d3c", "NVIDIA H200", 141 * GIB + 1000)
SLICE = Gpu("MIG-77aa", "NVIDIA H200 MIG 1g.18gb", 16 * GIB)
USUAL = ("cupy", "dask_cuda", "rmm")
ALL = (*USUAL, "torch", "numba")


def installed(names: Collection[str]):
    return mock.patch.object(memory, "packages", return_value=frozenset(names))


def made(gpu: Gpu = H200, *, shared: int = 1, packages=USUAL, protocol="tcp", **asked):
    with installed(packages):
        return plan(WorkerSpec(**asked), gpu, protocol=protocol, shared=shared)


# --- the plan -------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [H200, SLICE])
def test_the_default_is_a_pool_of_half_the_own_device_and_spilling_at_four_fifths(gpu):
    half = gpu.memory // 2 // 256 * 256
    assert made(gpu) == MemoryPlan(
        name=gpu.name,
        uuid=gpu.uuid,
        total=gpu.memory,
        allocator="pool",
        pool_size=half,
        libraries=("cupy",),
        device_store=True,
        device_memory_limit=int(0.8 * gpu.memory),
    )


@pytest.mark.parametrize(
    ("asked", "nbytes"),
    [
        ({"rmm_pool_size": "0.25"}, 4 * GIB),
        ({"rmm_pool_size": "100%"}, 16 * GIB),
        ({"rmm_pool_size": 2 * GIB + 255}, 2 * GIB),  # what RMM can take
        ({"rmm_pool_size": 17}, 256),
        ({"rmm_pool_size": "auto"}, 8 * GIB),
        ({"device_memory_limit": "50%"}, 8 * GIB),
        ({"device_memory_limit": "3GiB"}, 3 * GIB),
        ({"device_memory_limit": 0}, None),
        ({"device_memory_limit": "none"}, None),
    ],
)
def test_what_is_asked_for_is_a_part_of_the_slice(asked, nbytes):
    (option,) = asked
    found = made(SLICE, **asked)
    assert found.allocator == "pool"
    assert nbytes == (found.pool_size if "pool" in option else found.device_memory_limit)
    assert found.device_store  # also where nothing spills: device memory is not host memory


def test_sharers_have_no_pool_and_divide_the_limit_unless_they_ask():
    asked = made(SLICE, shared=4, rmm_pool_size=0.125, device_memory_limit=0.25)
    assert (asked.pool_size, asked.device_memory_limit) == (2 * GIB, 4 * GIB)
    found = made(SLICE, shared=4)
    assert (found.allocator, found.pool_size, found.libraries) == ("cuda", None, ())
    assert found.device_memory_limit == int(0.2 * 16 * GIB)


@pytest.mark.parametrize(
    ("listed", "instead"), [("numba", "cupy,numba"), ("torch", "cupy,torch"), ("none", "cupy")]
)
def test_a_pool_beside_cupy_s_own_is_refused(listed, instead):
    """CuPy ran out of memory at a tenth of the device. By default, it is told."""
    asked = {"rmm_allocator_external_lib_list": listed}
    problem = f"--rmm-allocator-external-lib-list {listed} leaves out cupy"
    assert made(packages=ALL, **asked).allocator == "pool"
    with installed(ALL):
        assert memory.missing(WorkerSpec(**asked)).startswith(problem)
    asked["rmm_pool_size"] = 0.9
    with pytest.raises(UsageError, match=rf"^{problem}.*\. Use {instead}, or --rmm-pool-size 0$"):
        made(packages=ALL, **asked)
    asked["rmm_allocator_external_lib_list"] = instead
    assert made(packages=ALL, **asked).libraries == tuple(instead.split(","))


def test_a_worker_on_the_cpu_has_nothing_to_plan():
    found = made(None, packages=(), rmm_pool_size="500GiB", device_memory_limit=0.5)
    assert found == MemoryPlan()
    assert memory.store(found, GIB) is None
    memory.apply(found)


@pytest.mark.parametrize(
    ("asked", "around", "words"),
    [
        ({"rmm_async": True, "rmm_pool_size": 0.5}, {}, "--rmm-pool-size: .* second allocator"),
        ({"rmm_async": True}, {"protocol": "ucx"}, "--rmm-async .* ucx: .* NVLink.*tcp"),
        ({"rmm_pool_size": "17GiB"}, {}, "--rmm-pool-size: 17.00 GiB .*16.00 GiB of .*MIG-77aa"),
        ({"device_memory_limit": "17GiB"}, {}, "--device-memory-limit: 17.00 GiB .*16.00 GiB"),
        ({"rmm_pool_size": 0.5}, {"shared": 3}, "8.00 GiB for each of 3 workers .*0.27"),
        ({"device_memory_limit": 0.8}, {"shared": 2}, "--device-mem.*2 workers .*0.4"),
        ({"rmm_allocator_external_lib_list": "torch"}, {}, "lib-list .*torch.*not installed"),
        ({"rmm_pool_size": 0.5}, {"packages": ()}, "--rmm-pool-size needs rmm"),
        ({"rmm_async": True}, {"packages": ()}, "--rmm-async needs rmm"),
        ({"device_memory_limit": 0.5}, {"packages": ()}, "--device-memory-limit needs dask-cuda"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_with_the_reason(asked, around, words):
    with pytest.raises(UsageError, match=words):
        made(SLICE, **asked, **around)


def test_defaults_do_without_missing_packages_and_say_so():
    found = made(packages=())
    assert (found.allocator, found.device_store, found.device_memory_limit) == ("cuda", False, None)
    words = (
        r"without rmm and dask-cuda, there is no memory pool .* spill .*: pip install \"cupy-cuda"
    )
    with installed(()):
        assert re.match(words, memory.missing(WorkerSpec()))
    with installed(USUAL):
        assert memory.missing(WorkerSpec()) is None


# --- the allocator --------------------------------------------------------------------------------


@pytest.fixture
def rmm(monkeypatch):
    """A stand-in for RMM."""
    found = mock.MagicMock()
    found.mr.available_device_memory.return_value = (3 * GIB, 16 * GIB)
    found.mr.get_current_device_resource.return_value.pool_size.return_value = 12 * GIB
    monkeypatch.setitem(sys.modules, "rmm", found)
    return found


def test_the_pool_can_grow(rmm):
    memory.apply(replace(made(SLICE), libraries=()))
    rmm.reinitialize.assert_called_once_with(pool_allocator=True, initial_pool_size=8 * GIB)


@needs("cupy")
def test_cupy_allocates_through_rmm(rmm, monkeypatch):
    import cupy

    for name in ("rmm.allocators", "rmm.allocators.cupy"):
        monkeypatch.setitem(sys.modules, name, rmm)
    set_to = mock.Mock()
    monkeypatch.setattr(cupy.cuda, "set_allocator", set_to)
    memory.apply(made(SLICE))
    set_to.assert_called_once_with(rmm.rmm_cupy_allocator)


POOL_FULL = (
    "std::bad_alloc: out_of_memory: RMM failure at:/src/rmm/mr/pool_memory_resource.hpp:257: "
    "Maximum pool size exceeded (failed to allocate 1.862645 GiB): No room in existing memory"
)
DEVICE_FULL = (
    "std::bad_alloc: out_of_memory: CUDA error (failed to allocate 8589934592 bytes) at: "
    "/src/rmm/mr/cuda_memory_resource.hpp:62: cudaErrorMemoryAllocation out of memory"
)


def test_a_device_that_is_full_at_start_is_an_error_that_tells_who_fills_it(rmm, nvml):
    rmm.reinitialize.side_effect = MemoryError(DEVICE_FULL)
    nvml([{"uuid": SLICE.uuid, "now": {"processes": [(11, 12 * GIB), (12, None)]}}])
    with pytest.raises(DeviceError) as caught:
        memory.apply(made(SLICE))
    assert str(caught.value) == (
        "no room for an RMM pool of 8.00 GiB on NVIDIA H200 MIG 1g.18gb (MIG-77aa) of 16.00 GiB: "
        "3.00 GiB are free, and these processes are on it: 11 (12.00 GiB), 12 (0 B). End what is "
        "left there, or ask for less with --rmm-pool-size"
    )
    # it comes out of the nanny
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_worker_that_was_started_again_waits_for_room(rmm, monkeypatch):
    rmm.mr.available_device_memory.side_effect = [(3 * GIB, 0), (7 * GIB, 0), (8 * GIB + 1, 0)]
    monkeypatch.setattr(memory, "ROOM_INTERVAL_S", 0)
    memory.apply(replace(made(SLICE), libraries=()), restarted=True)
    rmm.reinitialize.assert_called_once_with(pool_allocator=True, initial_pool_size=8 * GIB)
    assert rmm.mr.available_device_memory.call_count == 3


# --- the store ------------------------------------------------------------------------------------


class Device:
    """A stand-in for a GPU: it counts."""

    capacity = 1000
    used = 0

    @classmethod
    def free(cls, nbytes: int) -> None:
        cls.used -= nbytes


#: Python's class of that name needs CuPy; this one is found by name and module, as it is.
StandInOutOfMemory = type(
    "OutOfMemoryError", (MemoryError,), {"__module__": "cupy.cuda.memory.stand_in"}
)


class Block:
    """A stand-in for an array on the device."""

    __cuda_array_interface__: dict[str, object] = {}  # noqa: RUF012

    def __init__(self, nbytes: int) -> None:
        if Device.used + nbytes > Device.capacity:
            raise StandInOutOfMemory(
                f"Out of memory allocating {nbytes:,} bytes (allocated so far: {Device.used:,} "
                f"bytes)."
            )
        Device.used += nbytes
        self.nbytes = nbytes
        weakref.finalize(self, Device.free, nbytes).atexit = False

    def __reduce__(self):
        return Block, (self.nbytes,)


@sizeof.register(Block)
def size_of_block(block: Block) -> int:
    return block.nbytes


@pytest.fixture(autouse=True)
def an_empty_device():
    if Device.used:
        gc.collect()
    assert Device.used == 0


def with_worker(test, **options):
    """Call `test(client, worker)` with a real scheduler and worker in this process."""
    usual = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "memory_limit": 0}

    async def run() -> None:
        async with (
            asyncio.timeout(120),
            LocalCluster(asynchronous=True, dashboard_address=None, **usual, **options) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            await test(client, cluster.workers[0])

    asyncio.run(run())


@needs("dask_cuda")
@pytest.mark.parametrize("memory_limit", [0, 2000])
def test_results_spill_from_device_to_host_to_disk(memory_limit):
    """With dask-cuda's own store, which needs no GPU for this."""
    spec = replace(made(SLICE), device_memory_limit=500)
    make, limits = memory.store(spec, memory_limit)
    limits = {**limits, "memory_limit": memory_limit}
    numbers = [np.full(100, i) for i in range(4)]

    async def test(client, worker):
        on_host = client.map(lambda i: numbers[i].copy(), range(4), pure=False)
        await wait(on_host)
        on_device = client.map(Block, [200, 201, 202, 203])
        await wait(on_device)
        assert sum(block.nbytes for block in worker.data.device.values()) <= 500
        assert Device.used <= 500
        on_disk = os.listdir(os.path.join(worker.local_directory, "storage"))
        assert bool(on_disk) == bool(memory_limit)
        assert len(worker.data) == 8
        sizes = await client.gather(client.map(lambda block: block.nbytes, on_device))
        assert sizes == [200, 201, 202, 203]
        for i, found in enumerate(await client.gather(on_host)):
            assert (found == numbers[i]).all()
        del on_host, on_device, found
        while worker.data:  # noqa: ASYNC110 - nobody tells when a result is released
            await asyncio.sleep(0.01)

    with_worker(test, data=(make, limits))


# --- out of memory: recognised --------------------------------------------------------------------


def of_class(name: str, module: str, text: str, base: type[Exception] = RuntimeError) -> Exception:
    """A stand-in for an error of a library that is not here."""
    return type(name, (base,), {"__module__": module})(text)


def raised(error: Exception, first: Exception, how: str) -> Exception:
    """An error to which another one led."""
    if how == "cause":
        error.__cause__ = first
    error.__context__, error.__suppress_context__ = first, how != "context"
    return error


TORCH_FULL = "CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of ..."
CUPY_FULL = "OutOfMemoryError('Out of memory allocating 8,000 bytes (allocated so far: 0')"
RUNTIME = "cupy_backends.cuda.api.runtime"
OUT_OF_DEVICE_MEMORY = [
    MemoryError(POOL_FULL),
    MemoryError(DEVICE_FULL),
    of_class("OutOfMemoryError", "torch", TORCH_FULL),
    of_class("CUDARuntimeError", RUNTIME, "cudaErrorMemoryAllocation: out of memory"),
    of_class("CudaAPIError", "numba", "Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY"),
    of_class("CUBLASError", "cupy_backends.cuda.libs.cublas", "CUBLAS_STATUS_ALLOC_FAILED"),
    of_class("CURANDError", "cupy_backends", "CURAND_STATUS_ALLOCATION_FAILED"),
    of_class("CuFFTError", "cupy.cuda.cufft", "CUFFT_ALLOC_FAILED"),
    Exception(CUPY_FULL),
    raised(ValueError("no"), MemoryError(POOL_FULL), "cause"),
    raised(ValueError("no"), MemoryError(POOL_FULL), "context"),
]
OTHERS = [
    MemoryError(),
    MemoryError("std::bad_alloc"),
    MemoryError("Unable to allocate 7.28 TiB for an array with shape (1000000, 1000000)"),
    ValueError("out of memory"),
    of_class("OutOfMemoryError", "polars", "host"),
    raised(ValueError("no"), MemoryError(POOL_FULL), "hidden"),
    raised(ValueError("no"), MemoryError("host"), "cause"),
]


@pytest.mark.parametrize(
    ("error", "is_full"),
    [*((error, True) for error in OUT_OF_DEVICE_MEMORY), *((error, False) for error in OTHERS)],
    ids=repr,
)
def test_errors_of_a_full_device_are_told_from_others(error, is_full):
    assert oom.device_out_of_memory(error) == is_full


@needs("cupy")
def test_cupy_s_own_error_is_recognised():
    import cupy

    error = cupy.cuda.memory.OutOfMemoryError(10**10, 5 * 10**9, 0)
    assert oom.device_out_of_memory(error)
    assert oom.asked_for(error) == 10**10


# --- out of memory: explained and survived --------------------------------------------------------

PLAN = replace(made(SLICE), device_memory_limit=800, total=1000)


def test_the_explanation_says_where_how_much_and_what_next(rmm):
    cause = MemoryError(POOL_FULL)
    worker = SimpleNamespace(name="node7-3", data={"a": Block(300), "b": b"x" * 500})
    error = oom.explain(worker, PLAN, cause)
    assert isinstance(error, HpcdaskError)
    assert isinstance(error, MemoryError)
    assert error.__cause__ is cause
    assert str(error) == (
        "worker node7-3 is out of device memory on NVIDIA H200 MIG 1g.18gb (MIG-77aa) of 0.98 kiB: "
        "1.86 GiB did not fit. 3.00 GiB are free outside of the RMM pool of 12.00 GiB; results of "
        "Dask tasks hold 300 B, they spill above 800 B. What to do: use smaller chunks; spill "
        "earlier with a lower --device-memory-limit; use more GPUs"
    )
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    ("asked", "limit", "spilled"),
    [(150, 800, ["a", "b"]), (100, 800, ["a"]), (None, 800, []), (2000, 800, []), (150, None, [])],
)
def test_as_much_is_spilled_as_did_not_fit(asked, limit, spilled):
    host: dict[str, Block] = {}
    results = zict.Buffer({}, host, n=1000, weight=lambda key, block: block.nbytes)
    results.update({key: Block(100) for key in "abc"})
    data = SimpleNamespace(device_buffer=results)  # dask-cuda's store has it
    oom.make_room(data, replace(PLAN, device_memory_limit=limit), asked)
    assert list(host) == spilled


class FrugalWorker(Worker):
    """A worker whose failures are explained, as DeviceWorker's are."""

    async def execute(self, key, *, stimulus_id):
        event = await super().execute(key, stimulus_id=stimulus_id)
        return await oom.explained(self, PLAN, event)


class Mute(ValueError):
    """An exception with a mistake of its own."""

    def __str__(self) -> str:
        return self.no_such_attribute


def fails_to_say_why() -> None:
    raise Mute


def fails_because_of_it() -> None:
    try:
        raise Mute
    except Mute as error:
        raise KeyError("because") from error


def test_an_exception_that_fails_to_say_why_is_the_task_s_end():
    """Its Dask task hung for ever."""

    async def test(client, worker):
        for failing, kind in ((fails_to_say_why, Exception), (fails_because_of_it, KeyError)):
            error = await asyncio.wait_for(client.submit(failing, pure=False).exception(), 60)
            assert isinstance(error, kind)
        failed = client.submit(too_much, pure=False)
        assert isinstance(await asyncio.wait_for(failed.exception(), 60), DeviceMemoryError)

    with_worker(test, worker_class=FrugalWorker)


def too_much() -> int:
    kept = Block(900)
    return kept.nbytes + Block(200).nbytes


def in_a_wrapper() -> int:
    try:
        return too_much()
    except MemoryError as error:
        raise RuntimeError("the library failed") from error


def of_the_host() -> None:
    raise MemoryError("Unable to allocate 7.28 TiB for an array")


def test_the_next_task_that_fits_succeeds():
    async def test(client, worker):
        for failing, last in ((too_much, "__init__"), (in_a_wrapper, "in_a_wrapper")):
            failed = client.submit(failing, pure=False)
            error = await failed.exception()
            assert isinstance(error, DeviceMemoryError)
            assert "200 B did not fit" in str(error)
            assert f"worker {worker.name} is" in str(error)
            first = error
            while first.__cause__:
                first = first.__cause__
            assert type(first) is MemoryError  # a client may have no CuPy
            assert str(first).startswith("OutOfMemoryError: ")
            trace = traceback.extract_tb(await failed.traceback())
            assert trace[-1].name == last
            fits = client.submit(lambda: Block(1000).nbytes, pure=False)
            assert await fits == 1000
        with pytest.raises(MemoryError, match="Unable") as caught:
            await client.submit(of_the_host)
        assert not isinstance(caught.value, DeviceMemoryError)

    with_worker(test, worker_class=FrugalWorker)
