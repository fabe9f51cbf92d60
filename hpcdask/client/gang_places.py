"""Which rank of a gang goes where, so that as much data as possible stays."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

Worker = TypeVar("Worker", bound=Hashable)


def place(sizes: Sequence[Mapping[Worker, int]]) -> dict[Worker, int]:
    """Return the rank that each worker gets; `sizes` are the bytes of each rank by worker.

    Those with most data come first. A rank whose data are on several workers makes room.
    """
    most = [max(one.values(), default=0) for one in sizes]
    placed: dict[Worker, int] = {}

    def take(rank: int, tried: set[Worker]) -> bool:
        best = [worker for worker, nbytes in sizes[rank].items() if nbytes == most[rank]]
        for worker in sorted(best, key=placed.__contains__):
            if worker not in tried:
                tried.add(worker)
                if worker not in placed or take(placed[worker], tried):
                    placed[worker] = rank
                    return True
        return False

    for rank in sorted(range(len(sizes)), key=most.__getitem__, reverse=True):
        if not take(rank, set()):
            others = [worker for worker in sizes[rank] if worker not in placed]
            placed.update((worker, rank) for worker in others[:1])
    return placed
