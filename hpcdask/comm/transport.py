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
    """How workers exchange data.

    Attributes
    ----------
    protocol
        ``tcp`` or ``ucx``.
    reason
        Why, for the user, in one line.
    warnings
        What the user should know beside it, a line each.
    reach
        Whether ucx is for all, or for the workers of one node among each other.
    """

    protocol: Literal["tcp", "ucx"]
    reason: str
    warnings: tuple[str, ...] = ()
    reach: Reach = "all"


def choose(spec: WorkerSpec, nodes: Sequence[NodeLinks]) -> Choice:
    """Choose between tcp and ucx for all workers.

    ``auto`` takes ucx where every worker has a GPU, distributed-ucxx is there, and NVLink joins
    the GPUs of a node or InfiniBand joins the nodes. With NVLink only, nodes exchange over tcp.

    Parameters
    ----------
    spec
        The workers' options.
    nodes
        One seat per rank, or per node.

    Raises
    ------
    MissingExtra
        ``--protocol ucx`` where a node lacks distributed-ucxx.
    UsageError
        ``--protocol ucx`` that cannot work otherwise, or switches of ucx with ``--protocol tcp``.
    """
    return _choose(Topology(spec, nodes))


def choose_alone(spec: WorkerSpec, seat: NodeLinks) -> Choice:
    """Choose for the workers of one job, which does not know the others.

    Each pair of workers uses ucx if both have chosen it.

    Parameters
    ----------
    spec
        The workers' options.
    seat
        Of all workers of the job on this node.

    Raises
    ------
    MissingExtra, UsageError
        As `choose`.
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
    """The interface of each node: for ``auto``, the fastest that all of them have.

    InfiniBand before Slingshot before Ethernet; among several of a kind, one whose name all nodes
    have, the fastest of them (on the slowest node), the first by name.

    Returns
    -------
    dict of str to str
        Host to interface; the explicit one, which `check_interface` checks on its node; empty
        where none is asked for.

    Raises
    ------
    UsageError
        The nodes have no kind of interface in common.
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
    """Refuse an interface that a node does not have.

    Parameters
    ----------
    name
        The explicit ``--interface``.
    interfaces
        What ``fabric.interfaces(every=True)`` found on the node.
    host
        The node.

    Raises
    ------
    UsageError
        It has none of this name with an IPv4 address.
    """
    names = sorted(one.name for one in interfaces)
    if name not in names:
        raise UsageError(
            f"--interface: {host} has no interface {name} with an IPv4 address. "
            f"It has: {', '.join(names)}"
        )
