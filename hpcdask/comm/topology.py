"""Topology of the workers of a cluster, or of one job."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from hpcdask.gpu.devices import Gpu
from hpcdask.spec.specs import WorkerSpec

from .fabric import Fabric, Port


@dataclass(frozen=True)
class NodeLinks:
    """GPUs and links of one rank or node, for the choice of a transport."""

    host: str
    gpus: tuple[Gpu, ...]
    fabric: Fabric


class Topology:
    """The workers and what joins them, per rank or per node.

    Where they are one job of several, it is alone: it knows neither the other jobs nor their nodes.
    """

    def __init__(
        self, spec: WorkerSpec, seats: Sequence[NodeLinks], *, alone: bool = False
    ) -> None:
        self.spec = spec
        self.seats = seats
        self.alone = alone
        self.hosts: dict[str, list[NodeLinks]] = {}
        for seat in seats:
            self.hosts.setdefault(seat.host, []).append(seat)
        self.others = alone or len(self.hosts) > 1
        self.cuda = all(seat.gpus for seat in seats)
        self.mig = any(gpu.uuid.startswith("MIG-") for seat in seats for gpu in seat.gpus)

    def where(self, test: Callable[[Fabric], bool]) -> list[str]:
        """The nodes whose fabric passes a test."""
        return list(dict.fromkeys(seat.host for seat in self.seats if test(seat.fabric)))

    def lacking(self, module: str) -> list[str]:
        """The nodes whose UCX lacks a transport, where there is a UCX."""
        return self.where(
            lambda fabric: not fabric.ucx.problem and module not in fabric.ucx.transports
        )

    def without_port(self) -> list[str]:
        """The nodes where no port of InfiniBand counts."""
        return self.where(lambda fabric: not any(map(self._counts, fabric.infiniband)))

    def _counts(self, port: Port) -> bool:
        """Return whether ucx should use this port: RoCE needs a network that suits, so if asked."""
        return port.usable and (not port.roce or self.spec.protocol == "ucx")

    def slingshot(self) -> str:
        """The interface of Slingshot that all have; empty for none."""
        names = [
            {one.name for one in seat.fabric.interfaces if one.kind == "slingshot"}
            for seat in self.seats
        ]
        return min(set.intersection(*names), default="")

    def confined(self) -> list[str]:
        """The nodes where a worker does not see the GPU of another one.

        On those of a job that has a part of the node, workers see each other's GPUs.
        """

        def of_node(seats: Sequence[NodeLinks]) -> bool:
            used = {uuid for uuid in _uuids(seats) if not uuid.startswith("MIG-")}
            return any(
                (seat.fabric.gpus or seat.fabric.hidden_gpus) and not used <= set(seat.fabric.gpus)
                for seat in seats
                if seat.gpus
            )

        return [host for host, seats in self.hosts.items() if of_node(seats)]

    def partners(self, host: str) -> set[str]:
        """The GPUs of a node whose workers may exchange data; for a job, all that it can see."""
        seats = self.hosts[host]
        seen = [uuid for seat in seats for uuid in seat.fabric.gpus] if self.alone else []
        return {*_uuids(seats), *seen}

    def nvlink(self, host: str) -> Literal["all", "some", "none", "unknown"]:
        """Return whether NVLink joins a node's GPUs to all others, each to one, or less."""
        seats, others = self.hosts[host], self.partners(host)
        used = _uuids(seats)
        pairs = {frozenset(pair) for pair in itertools.product(used, others) if len({*pair}) == 2}
        joined = pairs & {frozenset(pair) for seat in seats for pair in seat.fabric.nvlink}
        if pairs == joined:
            return "all"
        if set(used) <= set().union(*joined):
            return "some"
        unknown = {frozenset(pair) for seat in seats for pair in seat.fabric.nvlink_unknown}
        return "unknown" if pairs & unknown else "none"

    def links(self, *, nvlink: bool) -> str:
        """Return what joins the workers where ucx is for all of them, perhaps NVLink too."""
        if self.others:
            nodes = "this node to others" if self.alone else f"the {len(self.hosts)} nodes"
            return f"InfiniBand joins {nodes}{', NVLink the GPUs inside' if nvlink else ''}"
        host, seats = next(iter(self.hosts.items()))
        most = "" if self.nvlink(host) == "all" else "most of "
        return f"NVLink joins {most}the {len(_uuids(seats))} GPUs of {host}"


def _uuids(seats: Sequence[NodeLinks]) -> list[str]:
    return list(dict.fromkeys(gpu.uuid for seat in seats for gpu in seat.gpus))
