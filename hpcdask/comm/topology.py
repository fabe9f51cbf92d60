"""GPUs and links of the ranks or nodes whose workers exchange data."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hpcdask.gpu.devices import Gpu

from .fabric import Fabric


@dataclass(frozen=True)
class NodeLinks:
    """GPUs and links of one rank or node, for the choice of a transport."""

    host: str
    gpus: tuple[Gpu, ...]
    fabric: Fabric


def by_host(seats: Sequence[NodeLinks]) -> dict[str, list[NodeLinks]]:
    """Group ranks by node."""
    hosts: dict[str, list[NodeLinks]] = {}
    for seat in seats:
        hosts.setdefault(seat.host, []).append(seat)
    return hosts


def uuids(seats: Sequence[NodeLinks]) -> set[str]:
    """Return the UUIDs of the GPUs that these ranks compute on."""
    return {gpu.uuid for seat in seats for gpu in seat.gpus}


def partners(seats: Sequence[NodeLinks], *, alone: bool) -> set[str]:
    """Return the GPUs of a node whose workers may exchange data: for one job, all that it sees."""
    seen = {uuid for seat in seats for uuid in seat.fabric.gpus} if alone else set()
    return uuids(seats) | seen


def confined(seats: Sequence[NodeLinks], *, alone: bool = False) -> bool:
    """Return whether a rank of a node, or one job there, does not see the GPU of another."""
    if alone:
        return any(seat.fabric.hidden_gpus for seat in seats)
    whole = {uuid for uuid in uuids(seats) if not uuid.startswith("MIG-")}
    return any(
        (seat.fabric.gpus or seat.fabric.hidden_gpus) and not whole <= set(seat.fabric.gpus)
        for seat in seats
        if seat.gpus
    )


def nvlink_joins(seats: Sequence[NodeLinks], *, alone: bool) -> bool:
    """Return whether NVLink joins each GPU of a node to one of its partners, if it has any."""
    used, others = uuids(seats), partners(seats, alone=alone)
    pairs = {pair for seat in seats for pair in seat.fabric.nvlink if others.issuperset(pair)}
    return len(others) < 2 or used <= set(itertools.chain(*pairs))
