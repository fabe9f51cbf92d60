"""Adaptive scaling of a detached cluster, as an attached notebook has it."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, Self

from hpcdask.logs import complain

if TYPE_CHECKING:
    from .attached import AttachedCluster


class Adapting:
    """Adaptive scaling of an attached cluster, which ``adapt`` returns.

    In an event loop it is there at once, as distributed's is, and can be awaited: JupyterLab's Dask
    extension does not wait, and reads the bounds.
    """

    def __init__(self, cluster: AttachedCluster, bounds: Mapping[str, Any]) -> None:
        self._cluster = cluster
        self._bounds = bounds
        self.minimum, self.maximum = bounds.get("minimum"), bounds.get("maximum")
        self._asked: asyncio.Task[Any] | None = None
        if cluster.asynchronous:
            self._asked = asyncio.ensure_future(self._ask())
            self._asked.add_done_callback(_tell)

    async def _ask(self) -> None:
        await self._cluster._ask("adapt", **self._bounds)

    async def settle(self) -> Self:
        """Wait until the cluster adapts. Raises UsageError if it refuses the bounds."""
        await (self._asked or self._ask())
        return self

    def __await__(self) -> Generator[Any, None, Self]:
        return self.settle().__await__()

    def stop(self) -> Any:
        """End it; the workers stay."""
        return self._cluster.sync(self._cluster._ask, "stop_adapting")


def _tell(asked: asyncio.Task[Any]) -> None:
    """Nobody may wait for it."""
    if not asked.cancelled() and (error := asked.exception()):
        complain(f"adapt: {error}")
