"""Choice of the workers' transport and interface.

Pure decisions from what `hpcdask.comm.fabric` saw on each node: does NVLink join the GPUs, does
InfiniBand join the nodes, can UCX be used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from hpcdask.errors import MissingExtra, UsageError
from hpcdask.gpu.devices import Gpu
from hpcdask.gpu.driver import cuda_extra
from hpcdask.logs import some
from hpcdask.spec.specs import WorkerSpec

from .fabric import Fabric, Interface
from .ucx_config import PREFER_SYSTEM

#: Which workers use ucx to each other: all, or those of a node, with tcp between the nodes.
Reach = Literal["all", "node"]

#: `--interface` that is chosen from what the nodes have.
AUTO = "auto"

USE_SYSTEM = (
    f"set {PREFER_SYSTEM}=true on all nodes with a UCX of the system or of conda that has "
    f"InfiniBand (with its ucx_info on PATH)"
)


@dataclass(frozen=True)
class Choice:
    """Chosen transport, the reason in one line for the user, and warnings, a line each.

    The reach of ucx is all workers, or those of one node among each other.
    """

    protocol: Literal["tcp", "ucx"]
    reason: str
    warnings: tuple[str, ...] = ()
    reach: Reach = "all"


class Obstacle(NamedTuple):
    """Reason why a link is not used, empty if it is, and the user's remedy, empty if none."""

    reason: str = ""
    remedy: str = ""


def choose(spec: WorkerSpec, nodes: Sequence[NodeLinks]) -> Choice:
    """Choose between tcp and ucx for all workers, by what joins each rank or node.

    ``auto`` takes ucx where every worker has a GPU, distributed-ucxx is there, and NVLink joins the
    GPUs of a node or InfiniBand joins the nodes. With NVLink only, nodes exchange over tcp. What
    was asked for by name and cannot work is an error.
    """
    return _choose(spec, nodes, alone=False)


def choose_alone(spec: WorkerSpec, seat: NodeLinks) -> Choice:
    """Choose for the workers of one job on this node, which does not know the others.

    Each pair of workers uses ucx if both have chosen it.
    """
    return _choose(spec, [seat], alone=True)


def _choose(spec: WorkerSpec, seats: Sequence[NodeLinks], *, alone: bool) -> Choice:
    nvlink = _missing_nvlink(spec, seats, alone=alone)
    infiniband = _missing_infiniband(spec, seats)
    others = alone or len(by_host(seats)) > 1
    idle, unusable = _nothing_to_join(seats, alone=alone), _unusable_ucx(spec, seats)
    links = [nvlink, infiniband] if others else [nvlink]
    remedies = tuple(f"{why}: {remedy}" for why, remedy in links if remedy and not idle)
    best = Choice("ucx", _links(seats, nvlink, alone=alone), remedies)
    if idle:  # links first: without them no package need be installed
        best = Choice("tcp", idle)
    elif all(why for why, _ in links):
        best = Choice("tcp", "; ".join(why for why, _ in reversed(links)), remedies)
    elif unusable:
        best = Choice("tcp", unusable)
    elif others and infiniband.reason:
        reason = f"NVLink inside nodes, tcp between them: {infiniband.reason}"
        best = Choice("ucx", reason, remedies, "node")
    return best if spec.protocol == "auto" else _by_name(spec, seats, best, unusable)


def _by_name(spec: WorkerSpec, seats: Sequence[NodeLinks], best: Choice, unusable: str) -> Choice:
    """Choose what the user named; `best` is what ``auto`` would be."""
    if spec.protocol == "tcp":
        if spec.enable_nvlink:
            raise UsageError(
                "--enable-nvlink is for ucx, and --protocol tcp is given: leave one out"
            )
        hints = (f"--protocol auto would take ucx: {best.reason}",) * (best.protocol == "ucx")
        return Choice("tcp", "--protocol tcp", hints)
    if lacking := _hosts(seats, lambda fabric: fabric.ucx.missing):
        raise MissingExtra("distributed_ucxx", cuda_extra(), f"--protocol ucx on {some(lacking)}")
    if unusable:
        raise UsageError(f"--protocol ucx cannot work: {unusable}")
    slow: tuple[str, ...] = ()
    if best.protocol == "tcp" or best.reach == "node":
        slow = (f"{best.reason}: without NVLink or InfiniBand ucx is slower than tcp",)
    return Choice("ucx", "--protocol ucx", (*best.warnings, *slow))


def _hosts(seats: Sequence[NodeLinks], test: Callable[[Fabric], bool]) -> list[str]:
    """Return the nodes whose fabric passes a test."""
    return list(dict.fromkeys(seat.host for seat in seats if test(seat.fabric)))


def _nothing_to_join(seats: Sequence[NodeLinks], *, alone: bool) -> str:
    """Return why there are no two GPUs that exchange data; empty if there are."""
    blind = [seat.host for seat in seats if not seat.gpus]
    if len(blind) == len(seats):
        return "workers compute on the CPU"
    if blind:
        return f"not every worker has a GPU: none on {some(blind)}"
    if sum(len(seat.gpus) for seat in seats) == 1 and not alone:
        return "a single worker has no other to exchange data with"
    return ""


def _missing_nvlink(spec: WorkerSpec, seats: Sequence[NodeLinks], *, alone: bool) -> Obstacle:
    """Return why NVLink does not join the GPUs inside each node."""
    hosts = by_host(seats)
    if spec.enable_nvlink:
        return Obstacle()
    for seat in seats:
        if not seat.fabric.ucx.permits("nvlink"):
            return Obstacle(f"UCX_TLS={seat.fabric.ucx.tls} on {seat.host} leaves out NVLink")
        if spec.enable_nvlink is False and not seat.fabric.ucx.tls:
            return Obstacle("--disable-nvlink leaves out NVLink")
    if any(uuid.startswith("MIG-") for uuid in uuids(seats)):
        return Obstacle("MIG slices cannot share memory with each other (CUDA IPC, NVLink)")
    if shut := [host for host, there in hosts.items() if confined(there, alone=alone)]:
        return Obstacle(
            f"workers on {some(shut)} are confined to their GPUs by a cgroup or a container, so "
            f"CUDA IPC and NVLink do not work between them",
            "let jobs have whole nodes, or start the ranks with --gpu-bind=none",
        )
    if all(len(partners(there, alone=alone)) < 2 for there in hosts.values()):
        return Obstacle(f"there is one GPU only on {some(hosts)}, so nothing to join by NVLink")
    for host, there in hosts.items():
        if not nvlink_joins(there, alone=alone):
            return Obstacle(f"NVLink does not join the GPUs of {host}")
    return Obstacle()


def _missing_infiniband(spec: WorkerSpec, seats: Sequence[NodeLinks]) -> Obstacle:
    """Return why InfiniBand does not join the nodes, which are several."""
    for seat in seats:
        if not seat.fabric.ucx.permits("infiniband"):
            return Obstacle(f"UCX_TLS={seat.fabric.ucx.tls} on {seat.host} leaves out InfiniBand")
    by_name = spec.protocol == "ucx"  # RoCE needs a network that suits
    without = _hosts(
        seats, lambda one: not any(p.usable and (by_name or not p.roce) for p in one.infiniband)
    )
    if not without:
        lacking = _hosts(seats, lambda one: not one.ucx.problem and "ib" not in one.ucx.transports)
        why = f"the UCX on {some(lacking)} cannot use the InfiniBand there"
        return Obstacle(why, USE_SYSTEM) if lacking else Obstacle()
    names = [{i.name for i in seat.fabric.interfaces if i.kind == "slingshot"} for seat in seats]
    if slingshot := min(set.intersection(*names), default=""):
        return Obstacle(
            f"UCX has no transport for Slingshot, which tcp can use (--interface {slingshot})"
        )
    return Obstacle(f"no usable InfiniBand on {some(without)}")


def _unusable_ucx(spec: WorkerSpec, seats: Sequence[NodeLinks]) -> str:
    """Return why UCX cannot carry the workers' data; empty if it can."""
    for seat in seats:
        ucx = seat.fabric.ucx
        if ucx.problem:
            same = _hosts(seats, lambda fabric: fabric.ucx.problem == ucx.problem)  # noqa: B023
            return f"on {some(same)}, {ucx.problem}"
        if seat.gpus and "cuda" not in ucx.transports:
            return f"the UCX on {seat.host} has no transport for CUDA: use one that has it"
        if seat.gpus and not ucx.permits("copies"):
            return f"UCX_TLS={ucx.tls} on {seat.host} leaves out cuda_copy for GPU memory"
        if seat.gpus and spec.rmm_async:
            return (
                "--rmm-async: memory of CUDA's asynchronous allocator cannot be shared between "
                "processes, and ucx then copies it at 0.24 to 0.37 GB/s"
            )
    return ""


def _links(seats: Sequence[NodeLinks], nvlink: Obstacle, *, alone: bool) -> str:
    """Return what joins the workers where ucx is for all of them."""
    hosts = by_host(seats)
    if alone or len(hosts) > 1:
        nodes = "this node to others" if alone else f"the {len(hosts)} nodes"
        return f"InfiniBand joins {nodes}{'' if nvlink.reason else ', NVLink the GPUs inside'}"
    return f"NVLink joins the {len(uuids(seats))} GPUs of {seats[0].host}"


def choose_interface(spec: WorkerSpec, nodes: Sequence[NodeLinks]) -> dict[str, str]:
    """Return the interface of each host: the user's, or for ``auto`` the best that all have.

    InfiniBand before Slingshot before Ethernet; of several, one whose name all nodes have, the
    fastest. Nothing in common is a UsageError; nothing asked for is empty. `check_interface` checks
    the user's on its node.
    """
    if spec.interface != AUTO:
        return {seat.host: spec.interface for seat in nodes} if spec.interface else {}
    for kind in ("infiniband", "slingshot", "ethernet"):
        speeds = {
            seat.host: {one.name: one.speed for one in seat.fabric.interfaces if one.kind == kind}
            for seat in nodes
        }
        if all(speeds.values()):
            common = set.intersection(*map(set, speeds.values()))
            return {
                host: min(common or own, key=lambda name: (-own[name], name))
                for host, own in speeds.items()
            }
    have = {s.host: [f"{one.name} ({one.kind})" for one in s.fabric.interfaces] for s in nodes}
    listed = "; ".join(f"{host}: {', '.join(names) or 'none'}" for host, names in have.items())
    raise UsageError(
        f"--interface auto: the nodes have no kind of network interface in common. {listed}. "
        f"Leave --interface out to take the one with the default route"
    )


def check_interface(name: str, interfaces: Iterable[Interface], host: str) -> None:
    """Raise UsageError unless a node has an interface, by its ``fabric.interfaces(every=True)``."""
    names = sorted(one.name for one in interfaces)
    if name not in names:
        raise UsageError(
            f"--interface: {host} has no interface {name} with an IPv4 address. "
            f"It has: {', '.join(names)}"
        )


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
