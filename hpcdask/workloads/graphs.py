"""Graphs that dask.array has no operation for, such as work on pairs of chunks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, cast

import dask.array as da
import numpy as np
from dask.base import tokenize
from dask.highlevelgraph import HighLevelGraph

from hpcdask.upstream.dask import Task, TaskRef

# 64 partial results of a few bytes are one message per worker.
SPLIT_EVERY = 64


def cut(n: int, parts: int) -> tuple[int, ...]:
    """Cut a length into parts of nearly the same length."""
    return tuple(b - a for a, b in itertools.pairwise(i * n // parts for i in range(parts + 1)))


def sum_of_chunks(
    function: Callable[..., Any], *x: da.Array, n_chunks: int, width: int, dtype: Any, **how: Any
) -> da.Array:
    """Add up what a function makes of each chunk of rows, (1, width) in NumPy, in a tree.

    The result has shape (width,), or () if the width is 1.
    """
    meta = np.empty((0, 0), dtype)
    chunks = ((1,) * n_chunks, (width,))
    partial = da.map_blocks(function, *x, chunks=chunks, dtype=dtype, meta=meta, **how)
    if width == 1:
        return cast("da.Array", partial.sum(split_every={0: SPLIT_EVERY, 1: 1}, dtype=dtype))
    return cast("da.Array", partial.sum(axis=0, split_every=SPLIT_EVERY, dtype=dtype))


class Graph:
    """A graph of plain functions, ended by a tree that merges small NumPy arrays.

    The token is what the results depend on: with equal tokens, Dask takes two graphs for the same.
    """

    def __init__(self, name: str, *token: Any) -> None:
        self.name = f"{name}-{tokenize(name, *token)}"
        self.tasks: dict[Any, Task] = {}

    def task(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> TaskRef:
        """Add a Dask task; arguments that this method returned stand for their results."""
        key = f"{function.__name__}-{self.name}", len(self.tasks)
        self.tasks[key] = Task(key, function, *args, **kwargs)
        return TaskRef(key)

    def block(
        self,
        function: Callable[..., Any],
        *args: Any,
        ndim: int,
        after: Sequence[Any],
        **kwargs: Any,
    ) -> da.Array:
        """Return what a last Dask task makes of its arguments, as one block.

        ``after`` are arrays whose blocks the graph refers to.
        """
        return self._ended(((1,),) * ndim, after, function, *args, **kwargs)

    def _ended(
        self,
        chunks: Any,
        after: Sequence[Any],
        function: Callable[..., Any],
        *args: Any,
        **how: Any,
    ) -> da.Array:
        key = (self.name, *[0] * len(chunks))
        self.tasks[key] = Task(key, function, *args, **how)
        graph = HighLevelGraph.from_collections(self.name, self.tasks, dependencies=after)
        meta = np.empty((0,) * len(chunks))
        return da.Array(graph, self.name, chunks=chunks, dtype=np.float64, meta=meta)

    def array(
        self,
        parts: Sequence[TaskRef],
        merge: Callable[..., Any],
        finish: Callable[..., Any],
        size: int | None = None,
    ) -> da.Array:
        """Merge partial results, up to 64 in one Dask task, and return the last one as an array.

        ``finish`` makes a float64 NumPy array of ``size``, or a scalar, of the last partial ones.
        """
        while len(parts) > SPLIT_EVERY:
            parts = [
                self.task(merge, *parts[i : i + SPLIT_EVERY])
                for i in range(0, len(parts), SPLIT_EVERY)
            ]
        return self._ended(() if size is None else ((size,),), (), finish, *parts)
