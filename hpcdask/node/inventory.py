"""Inventory of a node: GPUs, cores and memory for the workers of a rank or a job."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

from hpcdask.errors import MissingExtra
from hpcdask.gpu.devices import Gpu
from hpcdask.gpu.driver import cuda_extra
from hpcdask.spec.records import Record


@dataclass(frozen=True)
class Inventory(Record):
    """What a rank, or a job on one node, may use.

    ``local_index`` is the rank's number on its node. The GPUs are in CUDA's order. ``memory`` is in
    bytes of the host; ``quota`` is the number of cores whose time a cgroup allows, None for all.
    """

    rank: int
    host: str
    local_index: int
    gpus: tuple[Gpu, ...]
    cores: tuple[int, ...]
    memory: int
    quota: int | None = None

    @property
    def cpus(self) -> int:
        """Return how many threads can run at a time."""
        return min(len(self.cores), self.quota or len(self.cores))


def check_extras(*, cuda: bool) -> None:
    """Raise MissingExtra if workers on GPUs lack the package that makes their context."""
    try:
        found = find_spec("cuda.bindings") if cuda else True
    except ModuleNotFoundError:
        found = None
    if not found:
        raise MissingExtra("cuda-bindings", cuda_extra(), "a worker on a GPU")
