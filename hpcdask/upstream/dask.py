"""Private parts of dask, as in 2026.7.0 to 2026.8.0: what graphs are made of has no public name."""

from __future__ import annotations

from typing import Any

from dask._expr import FinalizeCompute as FinalizeCompute
from dask._task_spec import Alias as Alias
from dask._task_spec import List as List
from dask._task_spec import Task as Task
from dask._task_spec import TaskRef as TaskRef
from dask._task_spec import convert_legacy_graph as convert_legacy_graph


def meta_of(collection: Any) -> Any:
    """What the chunks of an array or the partitions of a DataFrame are, without elements."""
    return collection._meta
