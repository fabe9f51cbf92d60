"""Rechunks of device arrays by P2P, over workers of this process, with a stand-in for CuPy."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster
from distributed.shuffle import _rechunk

from device_stand_in import DeviceStandIn
from hpcdask.node.device_worker import take_device_arrays

DTYPES = ["bool", "int8", "uint16", "int32", "int64", "float16", "float32", "float64"]
DTYPES += ["complex64", "complex128"]
#: Shape, chunks before and after.
PATTERNS = [
    ((7,), ((2, 2, 3),), ((7,),)),
    ((11,), ((4, 4, 3),), ((1, 5, 5),)),
    ((13, 17), ((3, 5, 5), (17,)), ((13,), (4, 4, 4, 5))),
    ((13, 17), ((13,), (1, 16)), ((6, 7), (5, 12))),
    ((6, 5, 4), ((2, 2, 2), (5,), (4,)), ((6,), (3, 2), (1, 3))),
    ((1, 9, 1), ((1,), (3, 3, 3), (1,)), ((1,), (2, 7), (1,))),
    ((3, 6), ((3,), (2, 4)), ((2, 1), (0, 3, 3))),
]


@pytest.fixture(autouse=True)
def _rechunks_of_this_test(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = _rechunk.ArrayRechunkSpec
    monkeypatch.setattr(spec, "create_run_on_worker", spec.create_run_on_worker)
    monkeypatch.setattr(DeviceStandIn, "copies_to_host", [])
    take_device_arrays()


def with_workers(test: Callable[[Client, list[Any]], Awaitable[Any]], **keywords: Any) -> Any:
    """Call `test(client, workers)` with three workers in this process."""

    async def run() -> Any:
        async with (
            LocalCluster(
                n_workers=3,
                threads_per_worker=1,
                processes=False,
                asynchronous=True,
                dashboard_address=None,
                **{"protocol": "tcp", **keywords},
            ) as cluster,
            Client(cluster, asynchronous=True) as client,
        ):
            return await test(client, list(cluster.workers.values()))

    return asyncio.run(asyncio.wait_for(run(), timeout=120))


def numbers(shape: tuple[int, ...], dtype: str = "float64") -> np.ndarray:
    values = np.arange(1, 1 + np.prod(shape)).reshape(shape) * 3 % 251
    return (
        values % 2 if dtype == "bool" else values * (1 - 2j) if dtype[0] == "c" else values
    ).astype(dtype)


def on_device(x: np.ndarray, chunks: Any) -> da.Array:
    """A dask array whose chunks are stand-ins, which it does not know."""
    return da.from_array(x, chunks).map_blocks(DeviceStandIn, dtype=x.dtype, meta=x[:0])


def on_host(x: da.Array) -> da.Array:
    """The same with NumPy chunks, which fails where chunks are not on the device."""
    return x.map_blocks(DeviceStandIn.get, dtype=x.dtype, meta=np.empty((0,) * x.ndim, x.dtype))


async def rechunked(client: Client, x: da.Array, chunks: Any) -> np.ndarray:
    y = x.rechunk(chunks, method="p2p")
    assert any("p2p" in name for name in y.dask.layers)
    return await client.compute(on_host(y))


@pytest.mark.parametrize("disk", [True, False])
def test_device_arrays_are_rechunked_by_p2p(disk: bool) -> None:
    async def test(client: Client, workers: list[Any]) -> None:
        for shape, old, new in PATTERNS:
            for dtype in DTYPES if shape == (13, 17) else ["float64"]:
                x = numbers(shape, dtype)
                found = await rechunked(client, on_device(x, old), new)
                assert found.dtype == x.dtype
                np.testing.assert_array_equal(found, x)

    with dask.config.set({"distributed.p2p.storage.disk": disk}):
        with_workers(test)
