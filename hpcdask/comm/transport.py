"""Which transport workers use, and on which interface.

Pure decisions from what `hpcdask.comm.fabric` saw on each node.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hpcdask.errors import MissingExtra, UsageError
from hpcdask.gpu.driver import cuda_extra
from hpcdask.spec.specs import WorkerSpec

from . import ucx_config
from .fabric import Interface
from .topology import NodeLinks, Topology, some

#: Which workers use ucx to each other: all, or those of a node, with tcp between the nodes.
Reach = Literal["all", "node"]

#: `--interface` that is chosen from what the nodes have.
AUTO = "auto"


@dataclass(frozen=True)
class Choice:
    """How workers exchange data, why, in one line for the user, and what else to know, a line each.

    The reach of ucx is all workers, or those of one node among each other.
    """

    protocol: Literal["tcp", "ucx"]
    reason: str
    warnings: tuple[str, ...] = ()
    reach: Reach = "all"


def choose(spec: WorkerSpec, nodes: Sequence[NodeLinks]) -> Choice:
    """Choose between tcp and ucx for all workers, by what joins each rank or node.

    ``auto`` takes ucx where every worker has a GPU, distributed-ucxx is there, and NVLink joins the
    GPUs of a node or InfiniBand joins the nodes. With NVLink only, nodes exchange over tcp. What
    was asked for by name and cannot work is an error.
    """
    return _choose(Topology(spec, nodes))


def choose_alone(spec: WorkerSpec, seat: NodeLinks) -> Choice:
    """Choose for the workers of one job on this node, which does not know the others.

    Each pair of workers uses ucx if both have chosen it.
    """
    return _choose(Topology(spec, [seat], alone=True))


def _choose(site: Topology) -> Choice:
    spec = site.spec
    ucx_config.check(spec)
    if spec.protocol == "auto":
        return _best(site)
    if spec.protocol == "tcp":
        if asked := ucx_config.explicit_flags(spec, wanted=True):
            raise UsageError(f"{asked} is for ucx, and --protocol tcp is given: leave one out")
        best = _best(site)
        hints = (f"--protocol auto would take ucx: {best.reason}",) * (best.protocol == "ucx")
        return Choice("tcp", "--protocol tcp", hints)
    if lacking := site.where(lambda fabric: fabric.ucx.missing):
        raise MissingExtra("distributed_ucxx", cuda_extra(), f"--protocol ucx on {some(lacking)}")
    if obstacle := next(site.obstacles(), ""):
        raise UsageError(f"--protocol ucx cannot work: {obstacle}")
    return Choice("ucx", "--protocol ucx", tuple(site.cautions()))


def _best(site: Topology) -> Choice:
    """What ``auto`` takes. Links come first: without them no package need be installed."""
    nvlink = site.without_nvlink()
    infiniband = site.without_infiniband() if site.others else ""
    why = site.without_gpus() or site.without_peers()
    if not why and nvlink and (infiniband or not site.others):
        why = f"{infiniband}; {nvlink}" if infiniband else nvlink
    if why := why or next(site.obstacles(), ""):
        warnings = list(site.remedies())
        if asked := ucx_config.explicit_flags(site.spec, wanted=True):
            warnings.append(f"{asked} has no effect on tcp")
        return Choice("tcp", why, tuple(warnings))
    if infiniband:
        reason = f"NVLink inside nodes, tcp between them: {infiniband}"
        return Choice("ucx", reason, tuple(site.remedies()), "node")
    return Choice("ucx", site.links(), tuple(site.cautions()))


# Interfaces


def choose_interface(spec: WorkerSpec, nodes: Sequence[NodeLinks]) -> dict[str, str]:
    """The interface of each host: the explicit one, or for ``auto`` the fastest that all have.

    InfiniBand before Slingshot before Ethernet; among several of a kind, one whose name all nodes
    have, the fastest of them (on the slowest node), the first by name. Nothing in common is a
    UsageError; nothing asked for is empty. `check_interface` checks the explicit one on its node.
    """
    if spec.interface != "auto":
        return {seat.host: spec.interface for seat in nodes} if spec.interface else {}
    for kind in ("infiniband", "slingshot", "ethernet"):
        found = {seat.host: _of_kind(seat, kind) for seat in nodes}
        if not all(found.values()):
            continue
        common = set.intersection(*map(set, found.values()))
        if common:
            slowest = {name: min(speeds[name] for speeds in found.values()) for name in common}
            best = _fastest(slowest)
            return dict.fromkeys(found, best)
        return {host: _fastest(speeds) for host, speeds in found.items()}
    have = {
        seat.host: ", ".join(f"{one.name} ({one.kind})" for one in seat.fabric.interfaces) or "none"
        for seat in nodes
    }
    listed = "; ".join(f"{host}: {names}" for host, names in have.items())
    raise UsageError(
        f"--interface auto: the nodes have no kind of network interface in common. {listed}. "
        f"Leave --interface out to take the one with the default route"
    )


def _of_kind(seat: NodeLinks, kind: str) -> dict[str, int]:
    return {one.name: one.speed for one in seat.fabric.interfaces if one.kind == kind}


def _fastest(speeds: Mapping[str, int]) -> str:
    return min(speeds, key=lambda name: (-speeds[name], name))


def check_interface(name: str, interfaces: Iterable[Interface], host: str) -> None:
    """Refuse an interface that a node does not have, by ``fabric.interfaces(every=True)`` of it."""
    names = sorted(one.name for one in interfaces)
    if name not in names:
        raise UsageError(
            f"--interface: {host} has no interface {name} with an IPv4 address. "
            f"It has: {', '.join(names)}"
        )
