"""Choice of the workers' transport and interface.

Pure decisions from what `hpcdask.comm.fabric` saw on each node.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hpcdask.errors import MissingExtra, UsageError
from hpcdask.gpu.driver import cuda_extra
from hpcdask.logs import some
from hpcdask.spec.specs import WorkerSpec

from .fabric import Interface
from .obstacles import Obstacle, obstacles
from .topology import NodeLinks, Topology

#: Why ucx is not the default without fast links.
SLOWER = "without NVLink or InfiniBand ucx is slower than tcp"

#: Which workers use ucx to each other: all, or those of a node, with tcp between the nodes.
Reach = Literal["all", "node"]

#: `--interface` that is chosen from what the nodes have.
AUTO = "auto"


@dataclass(frozen=True)
class Choice:
    """Chosen transport, the reason in one line for the user, and warnings, a line each.

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
    found = obstacles(site)
    best = _best(site, found)
    if spec.protocol == "auto":
        return best
    if spec.protocol == "tcp":
        if spec.enable_nvlink:
            raise UsageError(
                "--enable-nvlink is for ucx, and --protocol tcp is given: leave one out"
            )
        hints = (f"--protocol auto would take ucx: {best.reason}",) * (best.protocol == "ucx")
        return Choice("tcp", "--protocol tcp", hints)
    if lacking := site.where(lambda fabric: fabric.ucx.missing):
        raise MissingExtra("distributed_ucxx", cuda_extra(), f"--protocol ucx on {some(lacking)}")
    if fatal := _first(found, severity="fatal"):
        raise UsageError(f"--protocol ucx cannot work: {fatal.line}")
    return Choice("ucx", "--protocol ucx", tuple(_cautions(site, found)))


def _first(found: Sequence[Obstacle], **wanted: str) -> Obstacle | None:
    """The first obstacle with these attributes."""
    for one in found:
        if all(getattr(one, name) == value for name, value in wanted.items()):
            return one
    return None


def _best(site: Topology, found: Sequence[Obstacle]) -> Choice:
    """Return the choice of ``auto``. Links first: without them no package need be installed."""
    nvlink = _first(found, link="nvlink")
    infiniband = _first(found, link="infiniband") if site.others else None
    nobody = _first(found, kind="workers") or _first(found, kind="alone")
    fatal, why = _first(found, severity="fatal"), ""
    if nobody:
        why = nobody.text
    elif nvlink and (infiniband or not site.others):
        why = f"{infiniband.text}; {nvlink.line}" if infiniband else nvlink.line
    elif fatal:
        why = fatal.line
    if why:
        warnings = _remedies(site, found)
        if site.spec.enable_nvlink:
            warnings.append("--enable-nvlink has no effect on tcp")
        return Choice("tcp", why, tuple(warnings))
    if infiniband:
        reason = f"NVLink inside nodes, tcp between them: {infiniband.text}"
        return Choice("ucx", reason, tuple(_remedies(site, found)), "node")
    return Choice("ucx", site.links(nvlink=nvlink is None), tuple(_cautions(site, found)))


def _remedies(site: Topology, found: Sequence[Obstacle]) -> list[str]:
    """Return remedies for InfiniBand that is idle."""
    if not site.others or not site.cuda or _first(found, kind="setting", link="infiniband"):
        return []
    idle = [one for one in found if one.link == "infiniband" and one.severity == "slow"]
    return [one.line for one in idle if one.remedy]


def _cautions(site: Topology, found: Sequence[Obstacle]) -> Iterator[str]:
    """Yield what may be slow or wrong although ucx is taken for all."""
    remedies = _remedies(site, found)
    yield from remedies
    packages = [seat.fabric.ucx.distributed_ucxx for seat in site.seats]
    ucx = [f"{s.fabric.ucx.ucx or 'unknown'} ({s.fabric.ucx.source})" for s in site.seats]
    for what, versions in (("distributed-ucxx", packages), ("UCX", ucx)):
        if len(set(versions)) > 1:
            hosts: dict[str, list[str]] = {}
            for seat, version in zip(site.seats, versions, strict=True):
                hosts.setdefault(version or "none", []).append(seat.host)
            table = "; ".join(f"{version} on {some(where)}" for version, where in hosts.items())
            yield f"{what} differs between nodes: {table}"
    own = site.where(lambda fabric: bool(fabric.ucx.tls))
    if own and site.spec.enable_nvlink is False:
        yield f"UCX_TLS is set on {some(own)} and counts more than --disable-nvlink"
    if workers := _first(found, kind="workers"):
        yield f"{workers.text}; {SLOWER}"
        return
    nvlink, infiniband = _first(found, link="nvlink"), _first(found, link="infiniband")
    if confined := _first(found, kind="confined"):
        yield confined.line
    elif any(site.nvlink(host) == "some" for host in site.hosts):
        yield "some pairs of GPUs have no NVLink between them and exchange over PCIe"
    elif (site.mig or not site.others) and nvlink and not _first(found, kind="alone"):
        yield f"{nvlink.line}: expect less than the speed of NVLink"
    if site.others and not remedies and infiniband:
        yield f"{infiniband.text}: between nodes ucx is slower than tcp without it"


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
        found = {
            seat.host: {one.name: one.speed for one in seat.fabric.interfaces if one.kind == kind}
            for seat in nodes
        }
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
