"""What joins the workers of a cluster, or of one job, and what keeps ucx from using it.

Every answer is a sentence for the user, and an empty one where nothing stands in the way.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from hpcdask.gpu.devices import Gpu
from hpcdask.spec.specs import WorkerSpec

from .fabric import Fabric, Port
from .ucx_config import (
    Link,
    blocking_settings,
    excluded_by,
    explicit_flags,
    permits,
    settings,
    ucx_environment,
)
from .ucx_install import PREFER_SYSTEM

#: Why ucx is not the default without fast links.
SLOWER = "without NVLink or InfiniBand ucx is slower than tcp"
ASYNC = (
    "--rmm-async: memory of CUDA's asynchronous allocator cannot be shared between processes, and "
    "ucx then copies it at 0.24 to 0.37 GB/s"
)
NO_IPC = "by a cgroup or a container, so CUDA IPC and NVLink do not work between"
NO_WAY = "nothing to open connections with: it needs tcp on a network interface, or InfiniBand"
NO_COPIES = "leaves out cuda_copy, without which UCX cannot send GPU memory"
USE_SYSTEM = (
    f"set {PREFER_SYSTEM}=true on all nodes with a UCX of the system or of conda that has "
    f"InfiniBand (its libucp.so must be in LD_LIBRARY_PATH or known to the loader)"
)


@dataclass(frozen=True)
class NodeLinks:
    """What one rank, or one node, brings to the choice: its workers' GPUs, and what joins them."""

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

    # Links

    def without_gpus(self) -> str:
        """Why there is no device memory that ucx could send."""
        blind = [seat.host for seat in self.seats if not seat.gpus]
        if len(blind) == len(self.seats):
            return "workers compute on the CPU"
        if blind:
            return f"not every worker has a GPU: none on {some(blind)}"
        return ""

    def without_peers(self) -> str:
        """Why no worker has another one to exchange data with."""
        workers = sum(max(1, len(seat.gpus)) for seat in self.seats)
        alone = workers == 1 and not self.alone
        return "a single worker has no other to exchange data with" if alone else ""

    def without_nvlink(self) -> str:
        """Why NVLink does not join the GPUs inside a node."""
        if self.mig:
            return "MIG slices cannot share memory with each other: neither CUDA IPC nor NVLink"
        if why := self._left_out("nvlink"):
            return why
        if why := self.confined():
            return why
        if all(len(self._partners(host)) < 2 for host in self.hosts):
            if len(self.hosts) > 1:
                return "no node has two GPUs that NVLink could join"
            return f"there is one GPU only on {min(self.hosts)}, so nothing that NVLink could join"
        for host in self.hosts:
            state = self._nvlink(host)
            if state == "unknown":
                return f"NVML does not tell whether NVLink joins the GPUs of {host}"
            if state == "none":
                return f"NVLink does not join the GPUs of {host}"
        return ""

    def confined(self) -> str:
        """Why workers of one node cannot map each other's memory."""
        if self.alone:
            count, host = max((seat.fabric.hidden_gpus, seat.host) for seat in self.seats)
            if not count:
                return ""
            what = f"{count} GPU{'s' * (count != 1)} of {host} {'is' if count == 1 else 'are'}"
            return (
                f"{what} kept from this job {NO_IPC} it and other jobs there: let jobs have whole "
                f"nodes"
            )
        hosts = [host for host, seats in self.hosts.items() if _confined(seats)]
        if not hosts:
            return ""
        return (
            f"workers on {some(hosts)} are confined to their GPUs {NO_IPC} them: let jobs have "
            f"whole nodes, or start the ranks with --gpu-bind=none"
        )

    def without_infiniband(self) -> str:
        """Why InfiniBand does not join the nodes."""
        if why := self._left_out("infiniband"):
            return why
        if without := self.without_port():
            if slingshot := self._slingshot():
                wanted = self.spec.interface in ("auto", slingshot)
                way = slingshot if wanted else f"with --interface {slingshot}"
                return f"UCX has no transport for Slingshot, which tcp can use ({way})"
            return f"no usable InfiniBand on {some(without)}"
        if lacking := self.lacking("ib"):
            return f"the UCX on {some(lacking)} cannot use the InfiniBand there"
        return ""

    def without_port(self) -> list[str]:
        """The nodes where no port of InfiniBand counts."""
        return self.where(lambda fabric: not any(map(self._counts, fabric.infiniband)))

    def _counts(self, port: Port) -> bool:
        """Whether ucx should use this port: RoCE needs a network that suits, so only if asked."""
        roce = port.link_layer == "Ethernet" and self.spec.enable_infiniband is True
        return port.usable and (port.link_layer == "InfiniBand" or roce)

    def _slingshot(self) -> str:
        names = [
            {one.name for one in seat.fabric.interfaces if one.kind == "slingshot"}
            for seat in self.seats
        ]
        return min(set.intersection(*names), default="")

    def _left_out(self, link: Link) -> str:
        for seat in self.seats:
            if setting := excluded_by(self.spec, seat.fabric.ucx.tls, link):
                name = {"nvlink": "NVLink", "infiniband": "InfiniBand"}[link]
                where = f" on {seat.host}" if seat.fabric.ucx.tls else ""
                return f"{setting}{where} leaves out {name}"
        return ""

    def _partners(self, host: str) -> set[str]:
        """The GPUs of a node whose workers may exchange data; for a job, all that it can see."""
        seats = self.hosts[host]
        seen = [uuid for seat in seats for uuid in seat.fabric.gpus] if self.alone else []
        return {*_uuids(seats), *seen}

    def _nvlink(self, host: str) -> Literal["all", "some", "none", "unknown"]:
        """Whether NVLink joins the workers' GPUs of a node to all others, each to one, or less."""
        seats, others = self.hosts[host], self._partners(host)
        used = _uuids(seats)
        pairs = {frozenset(pair) for pair in itertools.product(used, others) if len({*pair}) == 2}
        joined = pairs & {frozenset(pair) for seat in seats for pair in seat.fabric.nvlink}
        if pairs == joined:
            return "all"
        if set(used) <= set().union(*joined):
            return "some"
        unknown = {frozenset(pair) for seat in seats for pair in seat.fabric.nvlink_unknown}
        return "unknown" if pairs & unknown else "none"

    def links(self) -> str:
        """What joins the workers where ucx is for all of them."""
        if self.others:
            nodes = "this node to others" if self.alone else f"the {len(self.hosts)} nodes"
            nvlink = "" if self.without_nvlink() else ", NVLink the GPUs inside"
            return f"InfiniBand joins {nodes}{nvlink}"
        host, seats = next(iter(self.hosts.items()))
        most = "" if self._nvlink(host) == "all" else "most of "
        return f"NVLink joins {most}the {len(_uuids(seats))} GPUs of {host}"

    # What is installed

    def obstacles(self) -> Iterator[str]:
        """What makes ucx impossible, or does not give what was asked for."""
        spec = self.spec
        for problem in dict.fromkeys(seat.fabric.ucx.problem for seat in self.seats):
            if problem:
                broken = [seat.host for seat in self.seats if seat.fabric.ucx.problem == problem]
                yield f"on {some(broken)}, {problem}"
        if self.cuda and (lacking := self.lacking("cuda")):
            yield f"the UCX on {some(lacking)} has no transport for CUDA: use one that has it"
        without, lacking = self.without_port(), self.lacking("ib")
        if spec.enable_infiniband and without:
            yield f"--enable-infiniband, and there is no usable port on {some(without)}"
        if spec.enable_infiniband and lacking:
            yield f"the UCX on {some(lacking)} has no InfiniBand: {USE_SYSTEM}"
        if spec.enable_rdmacm and (unable := self.lacking("rdmacm")):
            yield f"the UCX on {some(unable)} cannot connect by RDMA (rdmacm): {USE_SYSTEM}"
        shut: dict[str, list[str]] = {}
        for seat in self.seats:
            if not seat.fabric.ucx.problem and (setting := self._shut(seat.fabric)):
                shut.setdefault(setting, []).append(seat.host)
        for setting, hosts in shut.items():
            yield f"{setting} leaves UCX on {some(hosts)} {NO_WAY}"
        for seat in self.seats:
            ucx = seat.fabric.ucx
            if seat.gpus and not ucx.problem and not permits(ucx.tls, "copies"):
                yield f"UCX_TLS={ucx.tls} on {seat.host} {NO_COPIES}"
        if spec.rmm_async and any(seat.gpus for seat in self.seats):
            yield ASYNC

    def _shut(self, fabric: Fabric) -> str:
        """Which settings leave UCX no interface; empty where there is one."""
        own = settings(fabric.ucx)
        if why := blocking_settings(
            fabric, {**ucx_environment(self.spec, own), **own}, far=self.others
        ):
            return " and ".join(
                name for name in why if name.partition("=")[0] in own
            ) or explicit_flags(self.spec)
        return ""

    def lacking(self, module: str) -> list[str]:
        """The nodes whose UCX lacks a transport, where there is a UCX."""
        return self.where(
            lambda fabric: not fabric.ucx.problem and module not in fabric.ucx.transports
        )

    # Warnings

    def remedies(self) -> Iterator[str]:
        """How to make use of InfiniBand that is idle."""
        if not self.others or not self.cuda or self._left_out("infiniband"):
            return
        without = self.without_port()
        shut = self.where(
            lambda f: any(p.state == "ACTIVE" and not p.accessible for p in f.infiniband)
        )
        if shut := [host for host in shut if host in without]:
            yield f"InfiniBand of {some(shut)} is closed to the workers: they need /dev/infiniband"
        roce = self.where(
            lambda f: any(p.usable and p.link_layer == "Ethernet" for p in f.infiniband)
        )
        if without and len(roce) == len(self.hosts):
            switches = "--enable-infiniband"
            switches += "" if self.without_nvlink() else " --enable-nvlink"
            lacks = self.lacking("ib")
            first = f", with a UCX that has InfiniBand ({USE_SYSTEM})" if lacks else ""
            yield (f"the nodes have RoCE ports: {switches} uses them{first}, if the network suits")
        if not without and (lacking := self.lacking("ib")):
            yield f"the UCX on {some(lacking)} cannot use the InfiniBand there: {USE_SYSTEM}"

    def cautions(self) -> Iterator[str]:
        """What may be slow or wrong although ucx is taken for all."""
        remedies = list(self.remedies())
        yield from remedies
        packages = [seat.fabric.ucx.distributed_ucxx for seat in self.seats]
        ucx = [f"{s.fabric.ucx.ucx or 'unknown'} ({s.fabric.ucx.source})" for s in self.seats]
        for what, versions in (("distributed-ucxx", packages), ("UCX", ucx)):
            if len(set(versions)) > 1:
                yield f"{what} differs between nodes: {self._table(versions)}"
        own = self.where(lambda fabric: bool(fabric.ucx.tls))
        if own and (switches := explicit_flags(self.spec)):
            yield f"UCX_TLS is set on {some(own)} and counts more than {switches}"
        if why := self.without_gpus():
            yield f"{why}; {SLOWER}"
            return
        if why := self.confined():
            yield why
        elif any(self._nvlink(host) == "some" for host in self.hosts):
            yield "some pairs of GPUs have no NVLink between them and exchange over PCIe"
        elif self.without_peers():
            pass
        elif (self.mig or not self.others) and (why := self.without_nvlink()):
            yield f"{why}: expect less than the speed of NVLink"
        if self.others and not remedies and (why := self.without_infiniband()):
            yield f"{why}: between nodes ucx is slower than tcp without it"

    def _table(self, versions: Sequence[str]) -> str:
        hosts: dict[str, list[str]] = {}
        for seat, version in zip(self.seats, versions, strict=True):
            hosts.setdefault(version or "none", []).append(seat.host)
        return "; ".join(f"{version} on {some(where)}" for version, where in hosts.items())


def some(hosts: Iterable[str]) -> str:
    """Names of nodes, three at most."""
    names = list(dict.fromkeys(hosts))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _uuids(seats: Sequence[NodeLinks]) -> list[str]:
    return list(dict.fromkeys(gpu.uuid for seat in seats for gpu in seat.gpus))


def _confined(seats: Sequence[NodeLinks]) -> bool:
    """Whether a worker does not see the GPU of another one on its node.

    A job that has a part of the node is not: its workers see each other's GPUs.
    """
    used = {uuid for uuid in _uuids(seats) if not uuid.startswith("MIG-")}
    return any(
        (seat.fabric.gpus or seat.fabric.hidden_gpus) and not used <= set(seat.fabric.gpus)
        for seat in seats
        if seat.gpus
    )
