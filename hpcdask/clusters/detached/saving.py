"""Collections that a detached cluster saves before its end.

The notebook publishes them, so that they outlive it, and names them to the cluster's process, which
saves them when its walltime comes near, and when it ends.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distributed import Client, Status, futures_of

from hpcdask.client import saving
from hpcdask.client.saved_folder import check_target
from hpcdask.errors import HpcdaskError, UsageError, root_cause

if TYPE_CHECKING:
    from hpcdask.clusters.cluster import JobCluster

#: Before the names under which they are published.
PREFIX = "save_before_end/"
#: Before other Dask tasks.
PRIORITY = 1000
WAITS, SAVED = "not saved yet", "saved"


class SavesBeforeEnd:
    """The part of an attached cluster that has it save."""

    scheduler_address: str
    sync: Callable[..., Any]
    _ask: Callable[..., Any]

    def save_before_end(self, folder: str | os.PathLike[str], **collections: Any) -> Any:
        """Have collections saved when the cluster comes to its end, with or without notebooks.

        Each is saved into ``FOLDER/NAME``, as by `hpcdask.save` with ``overwrite=True``, for
        `hpcdask.load`: when the walltime of the scheduler's job comes near, as the warning says,
        else at the end. It has 20 s after SIGTERM, such as by ``scancel``, and 180 s after
        `shutdown`. What was saved, or why not, is told to all, and is in ``hpcdask list``.

        Parameters
        ----------
        folder
            A folder that the scheduler's node and the workers see.
        **collections
            Persisted dask arrays or DataFrames, or what is made of such. They take the place of
            those of the last call; none ends it. They stay in memory while the cluster lives.

        Raises
        ------
        UsageError
            One is not persisted in this cluster, or cannot be saved there.
        """
        where = os.path.abspath(os.path.expanduser(folder))
        return self.sync(self._save_before_end, where, collections)

    async def _save_before_end(self, folder: str, collections: Mapping[str, Any]) -> None:
        found = {}
        for name, collection in collections.items():
            kind = await asyncio.to_thread(saving.check, collection)
            found[name] = (kind, _client_of(name, collection, self.scheduler_address))
        kinds = {name: kind for name, (kind, _) in found.items()}
        await self._ask("check_saves", folder=folder, kinds=kinds)
        for name, (_, client) in found.items():
            publish: Any = client.publish_dataset
            if not client.asynchronous:
                publish = functools.partial(asyncio.to_thread, publish)
            known = saving.without_device(collections[name])
            await publish(known, name=PREFIX + name, override=True)
        await self._ask("save_before_end", folder=folder, names=list(found))


def _client_of(name: str, collection: Any, address: str) -> Client:
    """The client that has persisted it. Raises UsageError if none has, in the cluster there."""
    futures = futures_of(collection)
    if not futures:
        raise UsageError(f"save_before_end: {name} is not persisted: {name} = {name}.persist()")
    client: Client = futures[0].client
    if client.scheduler is None or client.scheduler.address != address:
        raise UsageError(f"save_before_end: {name} is persisted in another cluster")
    return client


class Saver:
    """Saves in the cluster's process; `said` has what became of each name."""

    def __init__(self, cluster: JobCluster) -> None:
        assert cluster.scheduler is not None
        self.cluster = cluster
        self.scheduler = cluster.scheduler
        self.folder = Path()
        self.said: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    def summary(self) -> str:
        """One line of all names; empty if there are none."""
        words = [f"{name} {said}" for name, said in self.said.items()]
        return f"{', '.join(words)}, in {self.folder}" if words else ""

    def check(self, folder: str, kinds: Mapping[str, str]) -> None:
        """Raise UsageError if this process cannot save these kinds of collections there."""
        for name, kind in kinds.items():
            saving.parts(kind, f"save_before_end of {name}")
            check_target(Path(folder) / name, overwrite=True)

    async def replace(self, folder: str, names: list[str]) -> None:
        """Save these, which are published, and no longer the others."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        gone = set(self.said).difference(names)
        self.folder, self.said = Path(folder), dict.fromkeys(names, WAITS)
        if gone:
            async with self._client() as client:
                await client.unpublish_dataset([PREFIX + name for name in gone])

    def start(self) -> None:
        """Begin to save what is not saved yet."""
        if WAITS in self.said.values() and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._save_all())

    async def finish(self, limit_s: float) -> str:
        """Save what is not saved yet, or failed before, if it takes no longer; the summary."""
        if self._task is None or self._task.done():
            failed = [name for name, said in self.said.items() if not said.startswith(SAVED)]
            self.said.update(dict.fromkeys(failed, WAITS))
        self.start()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=limit_s)
            self._task.cancel()
            await asyncio.wait([self._task])
        for name, said in self.said.items():
            if said == WAITS:
                self._say(name, f"not saved: that takes longer than the {limit_s:.0f} s it had")
        return self.summary()

    async def _save_all(self) -> None:
        async with asyncio.TaskGroup() as group:  # one that cannot be computed keeps none waiting
            for name in [name for name, said in self.said.items() if said == WAITS]:
                group.create_task(self._try(name))

    async def _try(self, name: str) -> None:
        try:
            await self._save(name)
        except HpcdaskError as error:
            self._say(name, f"not saved: {error}")
        except Exception as error:  # such as that of a Dask task
            self._say(name, f"not saved: {root_cause(error)}")

    def _say(self, name: str, text: str) -> None:
        self.said[name] = text
        warning = "" if text.startswith(SAVED) else "warning: "
        self.cluster._say(f"{warning}{self.folder / name}: {text}")

    def _say_saved(self, name: str) -> None:
        self._say(name, f"{SAVED} at {time.strftime('%H:%M:%S')}")

    def _client(self) -> Client:
        address, security = self.scheduler.address, self.cluster.security
        return Client(address, security=security, asynchronous=True, set_as_default=False)

    async def _save(self, name: str) -> None:
        if self.scheduler.status != Status.running or not self.scheduler.workers:
            raise UsageError("there are no workers any more")
        async with self._client() as client:
            collection = await client.get_dataset(PREFIX + name)
            target = self.folder / name
            begin = functools.partial(saving.begin, collection, target, overwrite=True)
            beginning = asyncio.ensure_future(asyncio.to_thread(begin))
            try:
                begun = await asyncio.shield(beginning)
                result = await client.compute(begun.work, priority=PRIORITY)
            except BaseException:
                await asyncio.wait([beginning])
                if beginning.exception() is None:
                    await asyncio.to_thread(beginning.result().discard)
                raise
            finishing = asyncio.ensure_future(asyncio.to_thread(begun.finish, result))
            try:
                await asyncio.shield(finishing)
            except asyncio.CancelledError:  # that takes a moment
                await finishing
                self._say_saved(name)
                raise
        self._say_saved(name)
