"""Private parts of dask, as in 2026.7.0 to 2026.8.0: what graphs are made of has no public name."""

from __future__ import annotations

from typing import Any

import dask.highlevelgraph
from dask._expr import FinalizeCompute as FinalizeCompute
from dask._task_spec import Alias as Alias
from dask._task_spec import Task as Task
from dask._task_spec import convert_legacy_graph as convert_legacy_graph


def cull_by_layer() -> None:
    """Make each layer of a graph look at its own wanted keys only.

    dask's own looks at all of them, once for each `delayed` call of a graph: with 5,000 calls, 25
    million times.
    """
    layer: Any = dask.highlevelgraph.Layer
    cull = layer.cull
    if getattr(cull, "by_layer", False):
        return

    def of_its_own(self: Any, keys: set[Any], all_hlg_keys: Any) -> Any:
        if not self.has_legacy_tasks and len(self) <= len(keys):
            keys = {key for key in self if key in keys}
        return cull(self, keys, all_hlg_keys)

    of_its_own.by_layer = True  # type: ignore[attr-defined]
    layer.cull = of_its_own
