"""Choice of transport and interface: pure decisions from what `fabric` saw."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

from toolz import groupby

from hpcdask.errors import MissingExtra, UsageError
from hpcdask.gpu.devices import Gpu
from hpcdask.gpu.driver import cuda_extra
from hpcdask.logs import some
from hpcdask.spec.specs import WorkerSpec

from .fabric import Fabric
from .ucx_config import PREFER_SYSTEM

#: Workers that use ucx to each other: all, or those of a node, with tcp between the nodes.
Reach = Literal["all", "node"]
#: `--interface` that is chosen from what the nodes have.
AUTO = "auto"
USE_SYSTEM = (
    f"set {PREFER_SYSTEM}=true on all nodes with a UCX of the system or of conda that has "
    f"InfiniBand (with its ucx_info on PATH)"
)


@dataclass(frozen=True)
class NodeLinks:
    """GPUs and links of one rank or node."""

    host: str
    gpus: tuple[Gpu, ...]
    fabric: Fabric


@dataclass(frozen=True)
class Choice:
    """Transport, the reason for the user, and warnings; ucx reaches all workers or a node's."""

    protocol: Literal["tcp", "ucx"]
    reason: str
    warnings: tuple[str, ...] = ()
    reach: Reach = "all"


class Answer(NamedTuple):
    """Reason for a no, empty for a yes, and the user's remedy, empty if there is none."""

    reason: str = ""
    remedy: str = ""


def choose(spec: WorkerSpec, seats: Sequence[NodeLinks], *, alone: bool = False) -> Choice:
    """Choose between tcp and ucx for all workers, by what joins each rank or node.

    ``auto`` takes ucx where every worker has a GPU, UCX can be used, and NVLink joins the GPUs of a
    node or InfiniBand joins the nodes. With NVLink only, nodes exchange over tcp. What was asked
    for by name and cannot work is an error. The workers of one job on a node, ``alone``, do not
    know the others: each pair of workers uses ucx if both have chosen it.
    """
    hosts = {seat.host for seat in seats}
    several = alone or len(hosts) > 1
    nvlink, infiniband = _nvlink(spec, seats, alone=alone), _infiniband(spec, seats)
    idle, unusable = _nothing_to_join(seats, alone=alone), _unusable_ucx(spec, seats)
    links = [infiniband, nvlink] if several else [nvlink]
    remedies = tuple(f"{why}: {remedy}" for why, remedy in reversed(links) if remedy and not idle)
    if idle:  # links first: without them no package need be installed
        best = Choice("tcp", idle)
    elif all(why for why, _ in links):
        best = Choice("tcp", "; ".join(why for why, _ in links), remedies)
    elif unusable:
        best = Choice("tcp", unusable)
    elif not several:
        best = Choice("ucx", f"NVLink joins the {len(_uuids(seats))} GPUs of {seats[0].host}")
    elif infiniband.reason:
        reason = f"NVLink inside nodes, tcp between them: {infiniband.reason}"
        best = Choice("ucx", reason, remedies, "node")
    else:
        nodes = "this node to others" if alone else f"the {len(hosts)} nodes"
        inside = "" if nvlink.reason else ", NVLink the GPUs inside"
        best = Choice("ucx", f"InfiniBand joins {nodes}{inside}", remedies)
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


def _hosts(seats: Sequence[NodeLinks], test: Callable[[Fabric], object]) -> list[str]:
    return list(dict.fromkeys(seat.host for seat in seats if test(seat.fabric)))


def _uuids(seats: Sequence[NodeLinks]) -> set[str]:
    return {gpu.uuid for seat in seats for gpu in seat.gpus}


def _nothing_to_join(seats: Sequence[NodeLinks], *, alone: bool) -> str:
    """Return why there are no two GPUs that exchange data; empty if there are."""
    blind = [seat.host for seat in seats if not seat.gpus]
    if len(blind) == len(seats):
        return "workers compute on the CPU"
    if blind:
        return f"not every worker has a GPU: none on {some(blind)}"
    if sum(len(seat.gpus) for seat in seats) == 1 and not alone:
        return "a single GPU has no other to exchange data with"
    return ""


def _left_out(seats: Sequence[NodeLinks], part: str, name: str) -> str:
    """Return which ``UCX_TLS`` leaves out a part of UCX; empty if none does."""
    for seat in seats:
        if not seat.fabric.ucx.permits(part):
            return f"UCX_TLS={seat.fabric.ucx.tls} on {seat.host} leaves out {name}"
    return ""


def confined(seats: Sequence[NodeLinks], *, alone: bool = False) -> bool:
    """Return whether a rank of a node, or one job there, does not see the GPU of another."""
    if alone:
        return any(seat.fabric.hidden_gpus for seat in seats)
    whole = {uuid for uuid in _uuids(seats) if not uuid.startswith("MIG-")}
    return any(
        (seat.fabric.gpus or seat.fabric.hidden_gpus) and not whole <= set(seat.fabric.gpus)
        for seat in seats
        if seat.gpus
    )


def _nvlink(spec: WorkerSpec, seats: Sequence[NodeLinks], *, alone: bool) -> Answer:
    """Answer whether NVLink joins each GPU of a node to others there, where it has any."""
    if spec.enable_nvlink is not None:
        return Answer("" if spec.enable_nvlink else "--disable-nvlink leaves out NVLink")
    if reason := _left_out(seats, "nvlink", "NVLink"):
        return Answer(reason)
    if any(uuid.startswith("MIG-") for uuid in _uuids(seats)):
        return Answer("MIG slices cannot share memory with each other (CUDA IPC, NVLink)")
    hosts = groupby(attrgetter("host"), seats)
    if shut := [host for host, there in hosts.items() if confined(there, alone=alone)]:
        return Answer(
            f"workers on {some(shut)} are confined to their GPUs by a cgroup or a container, so "
            f"CUDA IPC and NVLink do not work between them",
            "let jobs have whole nodes, or start the ranks with --gpu-bind=none",
        )
    single = True
    for host, there in hosts.items():
        partners = _uuids(there)
        if alone:  # others may have all that it sees
            partners.update(*(seat.fabric.gpus for seat in there))
        pairs = [pair for seat in there for pair in seat.fabric.nvlink if partners.issuperset(pair)]
        if len(partners) > 1:
            single = False
            if not _uuids(there) <= set(itertools.chain(*pairs)):
                return Answer(f"NVLink does not join the GPUs of {host}")
    if single:
        return Answer(f"there is one GPU only on {some(hosts)}, so nothing to join by NVLink")
    return Answer()


def _infiniband(spec: WorkerSpec, seats: Sequence[NodeLinks]) -> Answer:
    """Answer whether InfiniBand joins the nodes, which are several."""
    if reason := _left_out(seats, "infiniband", "InfiniBand"):
        return Answer(reason)
    by_name = spec.protocol == "ucx"  # RoCE needs a network that suits
    if without := _hosts(
        seats, lambda one: not any(p.usable and (by_name or not p.roce) for p in one.infiniband)
    ):
        cards = [one for seat in seats for one in seat.fabric.interfaces if one.kind == "slingshot"]
        hint = f"; tcp can use Slingshot (--interface {cards[0].name})" if cards else ""
        return Answer(f"no usable InfiniBand on {some(without)}{hint}")
    if lacking := _hosts(seats, lambda one: not one.ucx.problem and "ib" not in one.ucx.transports):
        return Answer(f"the UCX on {some(lacking)} cannot use the InfiniBand there", USE_SYSTEM)
    return Answer()


def _unusable_ucx(spec: WorkerSpec, seats: Sequence[NodeLinks]) -> str:
    """Return why UCX cannot carry the workers' data; empty if it can."""
    on_gpus = [seat for seat in seats if seat.gpus]
    if lacking := _hosts(seats, lambda one: one.ucx.problem):
        first = next(seat.fabric.ucx.problem for seat in seats if seat.fabric.ucx.problem)
        return f"on {some(lacking)}, {first}"
    if lacking := _hosts(on_gpus, lambda one: "cuda" not in one.ucx.transports):
        return f"the UCX on {some(lacking)} has no transport for CUDA: use one that has it"
    if on_gpus and spec.rmm_async:
        return (
            "--rmm-async: memory of CUDA's asynchronous allocator cannot be shared between "
            "processes, and ucx then copies it at 0.24 to 0.37 GB/s"
        )
    return _left_out(on_gpus, "copies", "cuda_copy for GPU memory")


def choose_interface(spec: WorkerSpec, nodes: Sequence[NodeLinks]) -> dict[str, str]:
    """Return each host's interface: the user's, or for ``auto`` the fastest that all have."""
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
