"""Rechunks of device arrays by P2P: from device to device, spilling where a device is full.

distributed's P2P, which dask chooses for large rechunks, takes shards for host memory: it makes
bytes of them, and writes them to disk. Here shards of device arrays stay arrays. They travel as the
results of Dask tasks do, over ucx from device to device, and wait in the worker's store, which
spills. All else is distributed's, and so is every array on the host.

What `DeviceRechunkRun` overrides and calls, and the layout of shards, are private parts of
distributed, see `hpcdask.upstream.distributed_p2p`. This is imported when a worker first takes part
in a rechunk.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import dask
import numpy as np
from distributed.config import defaults
from distributed.protocol import to_serialize
from distributed.utils import sync
from distributed.utils_comm import retry

from hpcdask.upstream import dask_cuda
from hpcdask.upstream import distributed_p2p as upstream

#: Index of a chunk, or of a shard's place among those of an output chunk.
Index: TypeAlias = tuple[int, ...]
#: Where shards lie in their output chunk, with their shapes.
Places: TypeAlias = list[tuple[Index, tuple[int, ...]]]
#: As distributed has them: input chunk, and from it for each output chunk the place and the array.
Shards: TypeAlias = list[tuple[Index, list[tuple[Index, tuple[Index, Any]]]]]

#: Settings that hold for device arrays only where the user gave them.
MESSAGE_LIMIT = "distributed.p2p.comm.message-bytes-limit"
BUFFER_LIMIT = "distributed.p2p.comm.buffer"
#: Bytes of one message else: one of device memory takes some milliseconds, however small it is.
MESSAGE_NBYTES = 2**28
#: What waits to be sent cannot spill. It is less than this part of what may stay on the device.
BUFFER_PART = 16
#: Shards below this mean travel, and are kept, several in one array.
SMALL_NBYTES = 2**24
#: Bytes up to which they are joined for an output chunk, as long as what is being joined for all of
#: them is less than this part of what may stay on the device: to spill has a price per array.
ENTRY_NBYTES, ENTRIES_PART = 2**25, 2
#: Bytes that leave the store in one turn of the event loop.
TURN_NBYTES = 2**26


class Kept(NamedTuple):
    """An array in the store: a shard, or several one behind the other."""

    key: tuple[Any, ...]
    dtype: Any
    nbytes: int
    places: Places

    def is_open(self, limit: int, dtype: Any) -> bool:
        """Whether small shards of a type are joined with it."""
        return self.nbytes < limit and self.dtype == dtype


class DeviceRechunkRun(upstream.ArrayRechunkRun):
    """A worker's part in a rechunk, whose chunks may be device arrays.

    distributed's own run becomes one of these, so it has no constructor; `attend` sets it up.
    """

    def attend(self, worker: Any) -> None:
        """Keep shards in the worker's store, if that one spills device memory."""
        self._store: Any = {}
        self._entry_nbytes, self._buffer_nbytes = 0, math.inf
        if (limit := dask_cuda.device_limit(worker.data)) is not None:
            self._store = worker.data
            outputs = len(self.partitions_of.get(self.local_address, ())) or 1
            self._entry_nbytes = min(ENTRY_NBYTES, limit // ENTRIES_PART // outputs)
            self._buffer_nbytes = max(1, limit // BUFFER_PART)  # 0 would never be left
        self._kept: dict[Index, list[Kept]] = defaultdict(list)
        self._numbers = itertools.count()
        self._receiving = asyncio.Lock()
        # its buffer was given the method of the former class
        upstream.send_by(self, self.send)

    async def _write_to_comm(self, data: dict[str, Any]) -> None:
        if _on_device(data.values()):
            if not _is_given(MESSAGE_LIMIT):
                upstream.set_message_size(self, MESSAGE_NBYTES)
            if not _is_given(BUFFER_LIMIT):
                upstream.bound_buffer(self, self._buffer_nbytes)
        await super()._write_to_comm(data)

    async def send(self, address: str, shards: Shards) -> Any:
        """Send shards to a worker, or keep them if it is this one."""
        if not _on_device(shards):
            return await super().send(address, shards)
        if address == self.local_address:
            return await self.receive(shards)
        message = await self.offload(pack, shards)

        async def attempt() -> Any:
            self.raise_if_closed()
            return await self.rpc(address).shuffle_receive(
                data=message, shuffle_id=self.id, run_id=self.run_id
            )

        return await retry(
            attempt,
            count=self.RETRY_COUNT,
            delay_min=self.RETRY_DELAY_MIN,
            delay_max=self.RETRY_DELAY_MAX,
        )

    async def _receive(self, data: Any) -> None:
        shards: Shards = unpack(data) if isinstance(data, dict) else data
        if not _on_device(shards):
            await super()._receive(shards)
            return
        # a message that is repeated waits for the first, and brings nothing new
        async with self._receiving:
            self.raise_if_closed()
            fresh = [one for one in shards if one[0] not in self.received]
            self.received.update(source for source, _ in fresh)
            try:
                await self._keep(fresh)
            except Exception as error:
                upstream.fail(self, error)
                raise

    async def _keep(self, shards: Shards) -> None:
        """Put shards into the store, small ones joined with what came before them."""
        arrays = list(_arrays(shards))
        small = _are_small(arrays)
        found: dict[Index, list[tuple[Places, Any]]] = defaultdict(list)
        for _, parts in shards:
            for output, (place, array) in parts:
                found[output].append(([(place, array.shape)], array))
        for output, group in found.items():
            kept = self._kept[output]
            if small and kept and kept[-1].is_open(self._entry_nbytes, arrays[0].dtype):
                group.append(self._pop(output))
        entries = await self.offload(_joined_by_output, found) if small else found
        self.raise_if_closed()
        for output, group in entries.items():
            for places, array in group:
                key = (f"p2p-{self.id}", self.run_id, next(self._numbers))
                self._store[key] = array
                self._kept[output].append(Kept(key, array.dtype, array.nbytes, places))
        self.total_recvd += sum(array.nbytes for array in arrays)

    def _pop(self, output: Index) -> tuple[Places, Any]:
        """What was kept last, out of the store and on the device."""
        kept = self._kept[output].pop()
        array = self._store[kept.key]
        del self._store[kept.key]
        return kept.places, array

    def _get_output_partition(self, partition_id: Index, key: Any, **kwargs: Any) -> Any:
        kept = list(self._kept.get(partition_id, ()))
        if not kept:
            return super()._get_output_partition(partition_id, key, **kwargs)
        dtype = np.result_type(*{one.dtype for one in kept})
        shape, where = _layout([place for one in kept for place in one.places])
        output, missing = None, len(kept)
        while missing:
            taken = sync(upstream.loop(self), self._take, partition_id)
            missing -= len(taken)
            for places, array in taken:
                if output is None:
                    output = np.empty_like(array, dtype=dtype, shape=shape, order="C")
                for part, (place, _) in zip(_parts(array, places), places, strict=True):
                    output[where[place]] = part
            del taken, array, part  # before more is brought to the device
        return output

    async def _take(self, output: Index) -> list[tuple[Places, Any]]:
        """Some of what was kept for an output chunk, out of the store and on the device."""
        self.raise_if_closed()
        if not self._kept[output]:
            raise upstream.DataUnavailable(output)
        taken = [self._pop(output)]
        while self._kept[output] and sum(array.nbytes for _, array in taken) < TURN_NBYTES:
            taken.append(self._pop(output))
        return taken

    async def close(self) -> None:
        """Close, and let go of what was not asked for."""
        while self._kept:
            for one in self._kept.popitem()[1]:
                del self._store[one.key]
        # waits for messages that are under way, and lets no more in from its first step on
        await super().close()


def with_device_arrays(run: Any, worker: Any) -> Any:
    """The run that distributed made for a worker, which takes device arrays from now on."""
    run.__class__ = DeviceRechunkRun
    run.attend(worker)
    return run


def _is_given(setting: str) -> bool:
    return bool(dask.config.get(setting) != dask.config.get(setting, config=defaults))


def pack(shards: Shards) -> dict[str, Any]:
    """A message of shards, in which arrays stand where distributed's serialization finds them."""
    arrays = list(_arrays(shards))
    if _are_small(arrays):
        arrays = [_joined(arrays)]
    contents = [
        (source, [(output, place, array.shape) for output, (place, array) in parts])
        for source, parts in shards
    ]
    return {
        "contents": to_serialize(contents),
        **{str(number): to_serialize(array) for number, array in enumerate(arrays)},
    }


def unpack(message: Mapping[str, Any]) -> Shards:
    """The shards of a message; those that travelled in one array are views of it."""
    contents = message["contents"]
    places = [(place, shape) for _, parts in contents for _, place, shape in parts]
    arrays: Iterator[Any]
    if len(message) == 2:
        arrays = _parts(message["0"], places)
    else:
        arrays = (message[str(number)] for number in range(len(places)))
    return [
        (source, [(output, (place, next(arrays))) for output, place, _ in parts])
        for source, parts in contents
    ]


def _joined_by_output(
    found: Mapping[Index, list[tuple[Places, Any]]],
) -> dict[Index, list[tuple[Places, Any]]]:
    """All that goes into an output chunk in one array, which is no view."""
    return {
        output: [
            (
                [place for places, _ in group for place in places],
                _joined([array for _, array in group]),
            )
        ]
        for output, group in found.items()
    }


def _arrays(shards: Iterable[Any]) -> Iterator[Any]:
    return (array for _, parts in shards for _, (_, array) in parts)


def _on_device(shards: Iterable[Any]) -> bool:
    return any(hasattr(type(array), "__cuda_array_interface__") for array in _arrays(shards))


def _are_small(arrays: list[Any]) -> bool:
    """Whether these are better joined, and can be without a change of their values."""
    nbytes = sum(array.nbytes for array in arrays)
    return nbytes < SMALL_NBYTES * len(arrays) and len({array.dtype for array in arrays}) == 1


def _joined(arrays: list[Any]) -> Any:
    return np.concatenate([array.ravel() for array in arrays])


def _parts(array: Any, places: Places) -> Iterator[Any]:
    """Views of the shards that were joined."""
    flat, start = array.ravel(), 0
    for _, shape in places:
        stop = start + math.prod(shape)
        yield flat[start:stop].reshape(shape)
        start = stop


def _layout(
    places: Places,
) -> tuple[tuple[int, ...], dict[Index, tuple[slice, ...]]]:
    """Shape of an output chunk, and the slice of each place in it."""
    sizes: list[dict[int, int]] = [{} for _ in places[0][0]]
    for place, shape in places:
        for axis, index, size in zip(sizes, place, shape, strict=True):
            axis[index] = size
    if math.prod(map(len, sizes)) != len(places):
        raise RuntimeError(f"shards are missing: there are {len(places)}")
    stops = [np.cumsum([axis[index] for index in range(len(axis))]).tolist() for axis in sizes]
    where = {
        place: tuple(
            slice(stop[index] - size, stop[index])
            for stop, index, size in zip(stops, place, shape, strict=True)
        )
        for place, shape in places
    }
    return tuple(stop[-1] for stop in stops), where
