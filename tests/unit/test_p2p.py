"""Rechunks of device arrays by P2P, over workers of this process, with a stand-in for CuPy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster
from distributed.protocol import deserialize
from distributed.protocol import serialize as serialized
from distributed.protocol.cuda import cuda_deserialize, cuda_serialize
from distributed.shuffle import _rechunk

from device_stand_in import DeviceStandIn
from hpcdask.comm import p2p
from hpcdask.gpu import memory
from hpcdask.gpu.memory_plan import MemoryPlan
from hpcdask.node.device_worker import take_device_arrays
from launching import needs

DTYPES = ["bool", "int8", "uint16", "int64", "float16", "float32", "complex64", "complex128"]
#: Shape, chunks before and after.
PATTERNS = [
    ((7,), ((2, 2, 3),), ((7,),)),
    ((11,), ((4, 4, 3),), ((1, 5, 5),)),
    ((13, 17), ((3, 5, 5), (17,)), ((13,), (4, 4, 4, 5))),
    ((13, 17), ((13,), (1, 16)), ((6, 7), (5, 12))),
    ((6, 5, 4), ((2, 2, 2), (5,), (4,)), ((6,), (3, 2), (1, 3))),
    ((1, 9, 1), ((1,), (3, 3, 3), (1,)), ((1,), (2, 7), (1,))),
]
Test = Callable[[Client, list[Any]], Awaitable[Any]]


@pytest.fixture(autouse=True)
def _rechunks_of_this_test(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    spec = _rechunk.ArrayRechunkSpec
    monkeypatch.setattr(spec, "create_run_on_worker", spec.create_run_on_worker)
    monkeypatch.setattr(DeviceStandIn, "copies_to_host", [])
    take_device_arrays()
    with dask.config.set({"array.chunk-size": "1 B"}):  # else dask joins chunks before
        yield


def with_workers(test: Test, **keywords: Any) -> Any:
    """Call `test(client, workers)` with two workers in this process."""

    async def run() -> Any:
        async with (
            LocalCluster(
                n_workers=2,
                threads_per_worker=1,
                processes=False,
                asynchronous=True,
                dashboard_address=None,
                protocol="tcp",
                **keywords,
            ) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            return await test(client, list(cluster.workers.values()))

    return asyncio.run(asyncio.wait_for(run(), timeout=120))


def numbers(shape: tuple[int, ...], dtype: str = "float64") -> np.ndarray:
    values = np.arange(1, 1 + np.prod(shape)).reshape(shape) * 3 % 127
    if dtype == "bool":
        return values % 2 == 1
    return (values * (1 - 2j) if dtype.startswith("complex") else values).astype(dtype)


def on_device(x: np.ndarray, chunks: Any) -> da.Array:
    """A dask array whose chunks are stand-ins, which dask takes for NumPy arrays."""
    return da.from_array(x, chunks).map_blocks(DeviceStandIn, dtype=x.dtype, meta=x[:0])


def on_host(x: da.Array) -> da.Array:
    """The same with NumPy chunks, which fails where one is not a stand-in."""
    return x.map_blocks(DeviceStandIn.get, dtype=x.dtype, meta=np.empty((0,) * x.ndim, x.dtype))


def by_p2p(x: da.Array, chunks: Any) -> da.Array:
    y = x.rechunk(chunks, method="p2p")
    assert any("rechunk-p2p" in name for name in y.dask.layers)
    return y


async def nothing_is_kept(workers: list[Any]) -> None:
    """Wait until stores are empty, and no run is left."""
    for worker in workers:
        # neither tells
        while worker.data or worker.plugins["shuffle"].shuffle_runs._runs:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


# Results


@pytest.mark.parametrize("disk", [True, False])
def test_device_arrays_are_rechunked(disk: bool) -> None:
    async def test(client: Client, workers: list[Any]) -> None:
        for shape, old, new in PATTERNS:
            x = numbers(shape)
            found = await client.compute(on_host(by_p2p(on_device(x, old), new)))
            np.testing.assert_array_equal(found, x)
        for dtype in DTYPES:
            x = numbers((13, 17), dtype)
            found = await client.compute(on_host(by_p2p(on_device(x, 5), (13, 4))))
            assert found.dtype == x.dtype
            np.testing.assert_array_equal(found, x)
        await nothing_is_kept(workers)

    with dask.config.set({"distributed.p2p.storage.disk": disk}):
        with_workers(test)


@pytest.mark.parametrize("small", [1, 2**20])
def test_shards_of_any_size(monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    """Large ones travel by themselves, small ones in one array."""
    monkeypatch.setattr(p2p, "SMALL_NBYTES", small)
    monkeypatch.setattr(p2p, "TURN_NBYTES", 300)
    x = numbers((23, 29))

    async def test(client: Client, workers: list[Any]) -> None:
        sent: list[int] = []
        pack = p2p.pack
        monkeypatch.setattr(p2p, "pack", lambda shards: noted(pack(shards)))

        def noted(message: dict[str, Any]) -> dict[str, Any]:
            sent.append(len(message))
            return message

        found = await client.compute(on_host(by_p2p(on_device(x, (4, 29)), (23, 3))))
        np.testing.assert_array_equal(found, x)
        assert (set(sent) == {2}) is (small > 1)

    with_workers(test)


def test_unknown_chunks_are_as_with_dask() -> None:
    """Those along an axis that stays can be; others dask refuses."""
    x = numbers((12, 10))

    async def test(client: Client, workers: list[Any]) -> None:
        rows = on_device(x, (4, 5))
        rows._chunks = ((np.nan,) * 3, (5, 5))
        found = await client.compute(on_host(by_p2p(rows, {1: (2, 8)})))
        np.testing.assert_array_equal(found, x)
        with pytest.raises(ValueError, match="unknown"):
            rows.rechunk({0: 6}, method="p2p")

    with_workers(test)


def test_chunks_of_several_types_are_what_numpy_makes_of_them() -> None:
    x = numbers((8, 6))

    async def test(client: Client, workers: list[Any]) -> None:
        def narrow(block: DeviceStandIn, block_id: Any = None) -> DeviceStandIn:
            return block.astype("int32") if block_id[0] % 2 else block

        mixed = on_device(x, (2, 6)).map_blocks(narrow, dtype=x.dtype, meta=x[:0])
        found = await client.compute(on_host(by_p2p(mixed, (8, 2))))
        assert found.dtype == x.dtype
        np.testing.assert_array_equal(found, x)

    with_workers(test)


def test_a_transform_along_a_rechunked_axis() -> None:
    x = numbers((16, 6))

    async def test(client: Client, workers: list[Any]) -> None:
        with dask.config.set({"array.rechunk.method": "p2p"}):
            spectrum = da.fft.fft(on_device(x, (4, 6)).rechunk((16, 2)), axis=0)
        assert any("p2p" in name for name in spectrum.dask.layers)
        found = await client.compute(on_host(spectrum))
        np.testing.assert_allclose(found, np.fft.fft(x, axis=0))

    with_workers(test)


# Arrays on the host


@pytest.mark.parametrize("disk", [True, False])
def test_numpy_arrays_go_distributed_s_way(monkeypatch: pytest.MonkeyPatch, disk: bool) -> None:
    x = numbers((23, 29))

    def never(*args: Any) -> None:
        raise AssertionError

    for name in ("pack", "unpack", "_joined", "_layout"):
        monkeypatch.setattr(p2p, name, never)

    async def test(client: Client, workers: list[Any]) -> None:
        for chunks in (3, 23):
            y = by_p2p(da.from_array(x, (4, 29)), (23, chunks))
            np.testing.assert_array_equal(await client.compute(y), x)
        await nothing_is_kept(workers)

    with dask.config.set({"distributed.p2p.storage.disk": disk}):
        with_workers(test)


@needs("pandas")
@needs("pyarrow")
def test_data_frames_go_distributed_s_way(monkeypatch: pytest.MonkeyPatch) -> None:
    import pandas as pd
    from dask import dataframe as dd

    def never(*args: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(p2p, "with_device_arrays", never)
    frame = pd.DataFrame({"key": np.arange(60) % 7, "value": np.arange(60.0)})

    async def test(client: Client, workers: list[Any]) -> None:
        shuffled = dd.from_pandas(frame, npartitions=4).shuffle("key", shuffle_method="p2p")
        found = await client.compute(shuffled)
        pd.testing.assert_frame_equal(found.sort_index(), frame)

    with_workers(test)


# Memory


@needs("dask_cuda")
@pytest.mark.parametrize("memory_limit", [0, 20_000])
@pytest.mark.parametrize("device_memory_limit", [1000, 20_000])
def test_what_does_not_fit_spills(device_memory_limit: int, memory_limit: int) -> None:
    """To the host, and from there to disk; a worker has 40 kB in shards of 800 bytes."""
    x = numbers((100, 100))
    plan = MemoryPlan(device_store=True, device_memory_limit=device_memory_limit)
    make, limits = memory.store(plan, memory_limit)
    weights: list[float] = []
    largest: list[int] = []

    async def test(client: Client, workers: list[Any]) -> None:
        take = p2p.DeviceRechunkRun._take

        async def weighed(run: Any, output: Any) -> Any:
            weights.append(run._store.device_buffer.fast.total_weight)
            largest.extend(kept.nbytes for kept in run._kept[output])
            return await take(run, output)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(p2p.DeviceRechunkRun, "_take", weighed)
            y = on_host(by_p2p(on_device(x, (10, 100)), (100, 10)))
            found = await client.compute(y)
        np.testing.assert_array_equal(found, x)
        assert max(weights) <= device_memory_limit
        waiting = [worker.plugins["shuffle"].memory_limiter_comms.limit for worker in workers]
        assert waiting == [device_memory_limit // p2p.BUFFER_PART] * 2
        assert sum(DeviceStandIn.copies_to_host) > x.nbytes / 2
        # several were joined where there is room to wait for more
        assert device_memory_limit == 1000 or max(largest) > 800
        await nothing_is_kept(workers)

    with_workers(test, data=(make, {**limits, "memory_limit": memory_limit}), memory_limit=0)


def test_what_stays_on_a_worker_does_not_pass_the_host() -> None:
    x = numbers((20, 20))

    async def test(client: Client, workers: list[Any]) -> None:
        here = workers[0].address
        with dask.annotate(workers=[here]):
            y = by_p2p(on_device(x, (5, 20)), (20, 5))
            z = on_host(y)
        found = await client.compute(z, optimize_graph=False)
        np.testing.assert_array_equal(found, x)
        assert DeviceStandIn.copies_to_host == []

    with_workers(test)


def test_messages_that_come_twice_count_once() -> None:
    x = numbers((20, 20))

    async def test(client: Client, workers: list[Any]) -> None:
        receive = p2p.DeviceRechunkRun._receive

        async def twice(run: Any, data: Any) -> None:
            await asyncio.gather(receive(run, data), receive(run, data))

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(p2p.DeviceRechunkRun, "_receive", twice)
            found = await client.compute(on_host(by_p2p(on_device(x, (5, 20)), (20, 5))))
        np.testing.assert_array_equal(found, x)
        await nothing_is_kept(workers)

    with_workers(test)


def test_a_rechunk_that_is_given_up_leaves_nothing() -> None:
    x = numbers((20, 20))

    async def test(client: Client, workers: list[Any]) -> None:
        def slow(block: DeviceStandIn, block_id: Any = None) -> DeviceStandIn:
            if block_id == (3, 0):
                raise ArithmeticError("no such block")
            return block

        y = on_device(x, (5, 20)).map_blocks(slow, dtype=x.dtype, meta=x[:0])
        with pytest.raises(ArithmeticError, match="no such block"):
            await client.compute(on_host(by_p2p(y, (20, 5))))
        await nothing_is_kept(workers)

    with_workers(test)


# Messages


@pytest.mark.parametrize("small", [1, 2**20])
def test_every_array_of_a_message_can_stay_on_the_device(
    monkeypatch: pytest.MonkeyPatch, small: int
) -> None:
    """As distributed serializes for ucx: with the family `cuda`, or by pickle what has none."""
    monkeypatch.setattr(p2p, "SMALL_NBYTES", small)
    arrays: list[DeviceStandIn] = []
    cuda_serialize.register(DeviceStandIn)(lambda array: arrays.append(array) or ({}, [b""]))
    cuda_deserialize.register(DeviceStandIn)(lambda header, frames: arrays.pop(0))
    a, b = DeviceStandIn(numbers((3, 4))), DeviceStandIn(numbers((2, 4)))
    shards = [((0, 1), [((5, 0), ((1, 0), a))]), ((2, 2), [((5, 0), ((0, 0), b))])]
    families = ("cuda", "dask", "pickle", "error")
    message = {
        key: deserialize(*serialized(value, serializers=families))
        for key, value in p2p.pack(shards).items()
    }
    assert len(message) == (3 if small == 1 else 2)
    back = p2p.unpack(message)
    assert DeviceStandIn.copies_to_host == []
    assert [source for source, _ in back] == [(0, 1), (2, 2)]
    for expected, ((output, (place, array)),) in zip(
        shards, [parts for _, parts in back], strict=True
    ):
        assert (output, place) == (expected[1][0][0], expected[1][0][1][0])
        np.testing.assert_array_equal(array.get(), expected[1][0][1][1].get())


@needs("ucxx")
def test_ucx_knows_a_message_of_shards_for_one_of_the_device() -> None:
    from hpcdask.comm import ucx

    shards = [((0,), [((0,), ((0,), DeviceStandIn(numbers((3,)))))])]
    assert ucx._of_device({"op": "shuffle_receive", "data": p2p.pack(shards), "run_id": 1})


# What is distributed's


@pytest.mark.parametrize("disk", [True, False])
def test_distributed_alone_fails_with_device_arrays(
    monkeypatch: pytest.MonkeyPatch, disk: bool
) -> None:
    """If this passes one day, `hpcdask.comm.p2p` may have become superfluous."""
    monkeypatch.setattr(p2p, "with_device_arrays", lambda run, worker: run)

    async def test(client: Client, workers: list[Any]) -> None:
        y = by_p2p(on_device(numbers((20, 20)), (5, 20)), (20, 5))
        with pytest.raises(RuntimeError, match=r"P2P .* failed during"):
            await client.compute(on_host(y))

    with dask.config.set({"distributed.p2p.storage.disk": disk}):
        with_workers(test)


def test_it_is_installed_once() -> None:
    installed = _rechunk.ArrayRechunkSpec.create_run_on_worker
    take_device_arrays()
    assert _rechunk.ArrayRechunkSpec.create_run_on_worker is installed
