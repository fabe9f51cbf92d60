"""Which transport workers use, on which interface, and the UCX variables for it.

Pure decisions from what `hpcdask.fabric` saw on each node.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from .devices import CUDA_EXTRA, Gpu
from .errors import MissingExtra, UsageError
from .fabric import PREFER_SYSTEM, Fabric, Interface, Port
from .spec import WorkerSpec, option_name

#: Which workers use ucx to each other: all, or those of a node, with tcp between the nodes.
Reach = Literal["all", "node"]
#: Why ucx is not the default without fast links: measured between two processes of one host.
SLOWER = "without NVLink or InfiniBand ucx is slower than tcp (0.13 against 2.8 GB/s)"
ASYNC = (
    "--rmm-async: memory of CUDA's asynchronous allocator cannot be shared between processes, and "
    "ucx then copies it at 0.24 to 0.37 GB/s"
)
WHOLE_NODES = "let jobs have whole nodes, or start the ranks with --gpu-bind=none"
USE_SYSTEM = (
    f"set {PREFER_SYSTEM}=true on all nodes with a UCX of the system or of conda that has "
    f"InfiniBand (its libucp.so must be in LD_LIBRARY_PATH or known to the loader)"
)
SWITCHES = ("enable_nvlink", "enable_infiniband", "enable_rdmacm", "enable_tcp_over_ucx")
#: Names of the transports over NVLink and over InfiniBand in `UCX_TLS`.
_CUDA_IPC = re.compile(r"cuda|cuda_ipc")
_INFINIBAND = re.compile(r"ib|(rc|dc|ud)(_\w+)?")


@dataclass(frozen=True)
class Seat:
    """What one rank, or one node, brings to the choice.

    Attributes
    ----------
    host
        The node.
    gpus
        The GPUs of its workers; empty for a worker on the CPU.
    fabric
        What joins them.
    """

    host: str
    gpus: tuple[Gpu, ...]
    fabric: Fabric

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Seat:
        """Read what ``dataclasses.asdict`` and JSON made of a seat."""
        gpus = tuple(map(Gpu.from_json, data["gpus"]))
        return cls(data["host"], gpus, Fabric.from_json(data["fabric"]))


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


def choose(spec: WorkerSpec, nodes: Sequence[Seat]) -> Choice:
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
    _check_switches(spec)
    site = _Site(spec, nodes)
    if spec.protocol == "tcp":
        if asked := _asked(spec):
            raise UsageError(f"{asked} is for ucx, and --protocol tcp is given: leave one out")
        idle = not site.without_links() and not any(site.obstacles())
        hints = (f"{site.links()}: --protocol ucx or auto uses it",) if idle else ()
        return Choice("tcp", "--protocol tcp", hints)
    obstacle = next(site.obstacles(), "")
    if spec.protocol == "ucx":
        if lacking := [seat.host for seat in nodes if seat.fabric.ucx.missing]:
            why = f"--protocol ucx on {_some(lacking)}"
            raise MissingExtra("distributed_ucxx", CUDA_EXTRA, why)
        if obstacle:
            raise UsageError(f"--protocol ucx cannot work: {obstacle}")
        return Choice("ucx", "--protocol ucx", tuple(site.cautions()))
    why = site.without_links() or obstacle
    if why and site.nvlink_inside_only() and not any(site.obstacles(between=False)):
        reason = f"NVLink inside the nodes, tcp between them: {why}"
        return Choice("ucx", reason, tuple(site.remedies()), "node")
    if why:
        warnings = list(site.remedies())
        if asked := _asked(spec):
            warnings.append(f"{asked} has no effect on tcp")
        return Choice("tcp", why, tuple(warnings))
    return Choice("ucx", site.links(), tuple(site.cautions()))


def choose_alone(spec: WorkerSpec, seat: Seat) -> Choice:
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
    if spec.protocol != "auto":
        choice = choose(spec, [seat])
        hints = [text for text in choice.warnings if "expect less" not in text]
        if choice.protocol == "ucx" and seat.gpus and (hidden := _hidden(seat)):
            hints.append(hidden)
        return dataclasses.replace(choice, warnings=tuple(hints))
    _check_switches(spec)
    site = _Site(spec, [seat])
    why = site.without_gpus() or next(site.obstacles(between=False), "")
    if why:
        return Choice("tcp", why)
    if not site.without_port() and not site.lacking("ib") and not site.excluded_infiniband():
        return Choice("ucx", f"InfiniBand joins {seat.host} to other nodes")
    joined = {uuid for pair in seat.fabric.nvlink for uuid in pair} & set(_uuids([seat]))
    why = _hidden(seat) or site.excluded_nvlink()
    if why or not joined:
        return Choice("tcp", why or f"NVLink does not join this GPU of {seat.host} to another")
    return Choice("ucx", f"NVLink joins GPUs of {seat.host}; tcp to other nodes", (), "node")


def _hidden(seat: Seat) -> str:
    """That a job alone has been confined to its GPUs; empty where it has not."""
    count = seat.fabric.hidden_gpus
    if not count:
        return ""
    return (
        f"{count} GPU{'s' * (count != 1)} of {seat.host} belong{'s' * (count == 1)} to other jobs "
        f"only, so NVLink does not reach their workers: {WHOLE_NODES}"
    )


class _Site:
    """All workers of the cluster and what joins them."""

    def __init__(self, spec: WorkerSpec, nodes: Sequence[Seat]) -> None:
        self.spec = spec
        self.nodes = nodes
        self.hosts: dict[str, list[Seat]] = {}
        for seat in nodes:
            self.hosts.setdefault(seat.host, []).append(seat)
        self.workers = sum(max(1, len(seat.gpus)) for seat in nodes)
        self.cuda = all(seat.gpus for seat in nodes)
        self.several = len(self.hosts) > 1
        self.mig = any(gpu.uuid.startswith("MIG-") for seat in nodes for gpu in seat.gpus)
        self.confined = [host for host, seats in self.hosts.items() if _confined(seats)]

    def _where(self, test: Callable[[Fabric], bool]) -> list[str]:
        """The nodes whose fabric passes a test."""
        return list(dict.fromkeys(seat.host for seat in self.nodes if test(seat.fabric)))

    # Links

    def without_gpus(self) -> str:
        """Why there is no device memory that ucx could send; empty where there is."""
        blind = [seat.host for seat in self.nodes if not seat.gpus]
        if len(blind) == len(self.nodes):
            return "workers compute on the CPU"
        if blind:
            return f"not every worker has a GPU: none on {_some(blind)}"
        if self.mig:
            return "MIG slices cannot share memory with each other: neither CUDA IPC nor NVLink"
        return ""

    def without_links(self) -> str:
        """Why tcp is the better one whatever is installed; empty where ucx has fast links."""
        if why := self.without_gpus():
            return why
        if self.workers == 1:
            return "a single worker has no other to exchange data with"
        return self._without_infiniband() if self.several else self._without_nvlink()

    def _without_nvlink(self) -> str:
        host, seats = next(iter(self.hosts.items()))
        if self.spec.enable_nvlink is False:
            return "--disable-nvlink"
        if self.confined:
            return (
                f"each worker on {host} is confined to its GPU by a cgroup or a container, so "
                f"CUDA IPC and NVLink do not work between them: {WHOLE_NODES}"
            )
        if len(_uuids(seats)) < 2:
            return "the workers share one GPU, so there is no NVLink between them"
        state = _nvlink(seats)
        if state == "unknown":
            return f"NVML does not tell whether NVLink joins the GPUs of {host}"
        if state == "none":
            return f"NVLink does not join the GPUs of {host}"
        return self._excluded("NVLink", _CUDA_IPC)

    def _without_infiniband(self) -> str:
        if self.spec.enable_infiniband is False:
            return "--disable-infiniband, and between nodes ucx is slower than tcp without it"
        without = self.without_port()
        if not without:
            return self._excluded("InfiniBand", _INFINIBAND)
        if slingshot := self._slingshot():
            wanted = self.spec.interface in ("auto", slingshot)
            way = "" if wanted else f" (use it with --interface {slingshot})"
            return f"UCX has no transport for Slingshot, so tcp over {slingshot}{way}"
        return (
            f"no usable InfiniBand on {_some(without)}, and between nodes ucx is slower than tcp "
            f"without it"
        )

    def without_port(self) -> list[str]:
        """The nodes where no port of InfiniBand counts."""
        return self._where(lambda fabric: not any(map(self._counts, fabric.infiniband)))

    def _counts(self, port: Port) -> bool:
        """Whether ucx should use this port: RoCE needs a network that suits, so only if asked."""
        roce = port.link_layer == "Ethernet" and self.spec.enable_infiniband is True
        return port.usable and (port.link_layer == "InfiniBand" or roce)

    def nvlink_inside_only(self) -> bool:
        """Whether ucx is worth its while inside the nodes, whatever joins them."""
        usable = self.several and not self.without_gpus() and self._nvlink_inside()
        return usable and not self.excluded_nvlink()

    def excluded_nvlink(self) -> str:
        """Why the user's settings keep UCX from NVLink; empty where they do not."""
        if self.spec.enable_nvlink is False:
            return "--disable-nvlink"
        return self._excluded("NVLink", _CUDA_IPC)

    def excluded_infiniband(self) -> str:
        """The same for InfiniBand."""
        if self.spec.enable_infiniband is False:
            return "--disable-infiniband"
        return self._excluded("InfiniBand", _INFINIBAND)

    def _nvlink_inside(self) -> bool:
        """Whether NVLink works on all nodes that have several GPUs in use."""
        states = [_nvlink(seats) for seats in self.hosts.values() if len(_uuids(seats)) > 1]
        usable = not self.confined and self.spec.enable_nvlink is not False
        return usable and bool(states) and all(state in ("all", "some") for state in states)

    def _slingshot(self) -> str:
        names = [_of_kind(seat, "slingshot") for seat in self.nodes]
        return min(set.intersection(*map(set, names)), default="")

    def _excluded(self, what: str, transports: re.Pattern[str]) -> str:
        for seat in self.nodes:
            if not _allows(seat.fabric.ucx.tls, transports):
                return f"UCX_TLS={seat.fabric.ucx.tls} on {seat.host} leaves out {what}"
        return ""

    def links(self) -> str:
        """What joins the workers, for the user."""
        if self.several:
            nvlink = ", NVLink their GPUs" * self._nvlink_inside()
            return f"InfiniBand joins the {len(self.hosts)} nodes{nvlink}"
        host, seats = next(iter(self.hosts.items()))
        most = "" if _nvlink(seats) == "all" else "most of "
        return f"NVLink joins {most}the {len(_uuids(seats))} GPUs of {host}"

    # What is installed

    def obstacles(self, *, between: bool = True) -> Iterator[str]:
        """What makes ucx impossible, or under auto worse than tcp, also `between` nodes."""
        spec = self.spec
        for problem in dict.fromkeys(seat.fabric.ucx.problem for seat in self.nodes):
            if problem:
                broken = [seat.host for seat in self.nodes if seat.fabric.ucx.problem == problem]
                yield f"on {_some(broken)}, {problem}"
        if self.cuda and (lacking := self.lacking("cuda")):
            yield f"the UCX on {_some(lacking)} has no transport for CUDA: use one that has it"
        if spec.enable_infiniband and (without := self.without_port()):
            yield f"--enable-infiniband, and there is no usable port on {_some(without)}"
        if lacking := self.lacking("ib"):
            if spec.enable_infiniband:
                yield f"the UCX on {_some(lacking)} has no InfiniBand: {USE_SYSTEM}"
            elif between and self.several and spec.protocol != "ucx":
                yield (
                    f"InfiniBand joins the nodes, but the UCX on {_some(lacking)} cannot use it, "
                    f"and between nodes ucx is slower than tcp without it"
                )
        if spec.enable_rdmacm and (lacking := self.lacking("rdmacm")):
            yield f"the UCX on {_some(lacking)} cannot connect by RDMA (rdmacm): {USE_SYSTEM}"
        closed = self.without_port() or self.lacking("ib")
        if closed and spec.enable_tcp_over_ucx is False:
            yield (
                f"--disable-tcp-over-ucx leaves UCX on {_some(closed)} nothing to open connections "
                f"with: it needs tcp or InfiniBand"
            )
        if spec.rmm_async and any(seat.gpus for seat in self.nodes):
            yield ASYNC

    def lacking(self, module: str) -> list[str]:
        """The nodes whose UCX lacks a transport."""
        return self._where(lambda fabric: module not in fabric.ucx.transports)

    # Warnings

    def remedies(self) -> Iterator[str]:
        """How to make use of InfiniBand that is idle."""
        if not self.several or not self.cuda or self.spec.enable_infiniband is False:
            return
        shut = self._where(
            lambda fabric: any(
                port.state == "ACTIVE" and not port.accessible for port in fabric.infiniband
            )
        )
        if shut:
            yield f"InfiniBand of {_some(shut)} is closed to the workers: they need /dev/infiniband"
        roce = self._where(
            lambda fabric: any(
                port.usable and port.link_layer == "Ethernet" for port in fabric.infiniband
            )
        )
        without = self.without_port()
        if without and len(roce) == len(self.hosts):
            yield "the nodes have RoCE ports: --enable-infiniband uses them, if the network suits"
        lacking = self.lacking("ib")
        if lacking and not without and not any(seat.fabric.ucx.problem for seat in self.nodes):
            yield f"the UCX on {_some(lacking)} cannot use the InfiniBand there: {USE_SYSTEM}"

    def cautions(self) -> Iterator[str]:
        """What may be slow or wrong although ucx is taken."""
        yield from self.remedies()
        packages = [seat.fabric.ucx.distributed_ucxx for seat in self.nodes]
        ucx = [f"{s.fabric.ucx.ucx or 'unknown'} ({s.fabric.ucx.source})" for s in self.nodes]
        for what, versions in (("distributed-ucxx", packages), ("UCX", ucx)):
            if len(set(versions)) > 1:
                yield f"{what} differs between nodes: {self._table(versions)}"
        if not self.cuda:
            yield f"not every worker has a GPU, and {SLOWER}"
            return
        if self.mig:
            yield "MIG slices cannot share memory with each other, so ucx copies through the host"
        elif self.confined:
            yield (
                f"workers on {_some(self.confined)} are confined to their GPUs, so CUDA IPC and "
                f"NVLink do not work between them: {WHOLE_NODES}"
            )
        elif any(_nvlink(seats) == "some" for seats in self.hosts.values()):
            yield "some pairs of GPUs have no NVLink between them and exchange over PCIe"
        elif self.workers > 1 and not self.several and (why := self._without_nvlink()):
            yield f"{why}: expect less than the speed of NVLink"
        if self.several and (why := self._without_infiniband()):
            yield why

    def _table(self, versions: Sequence[str]) -> str:
        hosts: dict[str, list[str]] = {}
        for seat, version in zip(self.nodes, versions, strict=True):
            hosts.setdefault(version or "none", []).append(seat.host)
        return "; ".join(f"{version} on {_some(where)}" for version, where in hosts.items())


def _some(hosts: Iterable[str]) -> str:
    names = list(dict.fromkeys(hosts))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _uuids(seats: Sequence[Seat]) -> list[str]:
    return list(dict.fromkeys(gpu.uuid for seat in seats for gpu in seat.gpus))


def _confined(seats: Sequence[Seat]) -> bool:
    """Whether a worker does not see the GPU of another one on its node.

    A job that has a part of the node is not: its workers see each other's GPUs.
    """
    used = {uuid for uuid in _uuids(seats) if not uuid.startswith("MIG-")}
    return any(
        (seat.fabric.gpus or seat.fabric.hidden_gpus) and not used <= set(seat.fabric.gpus)
        for seat in seats
        if seat.gpus
    )


def _nvlink(seats: Sequence[Seat]) -> Literal["all", "some", "none", "unknown"]:
    """Whether NVLink joins all pairs of the GPUs used on a node, each GPU to another, or less."""
    used = _uuids(seats)
    pairs = {frozenset(pair) for pair in itertools.combinations(used, 2)}
    joined = pairs & {frozenset(pair) for seat in seats for pair in seat.fabric.nvlink}
    if pairs and pairs == joined:
        return "all"
    if pairs and set(used) == set().union(*joined):
        return "some"
    unknown = {frozenset(pair) for seat in seats for pair in seat.fabric.nvlink_unknown}
    return "unknown" if pairs & unknown else "none"


def _allows(tls: str, transports: re.Pattern[str]) -> bool:
    """Whether the user's ``UCX_TLS`` lets UCX use one of these transports."""
    if tls.startswith("^"):  # a single one of InfiniBand's leaves the others
        return not {"ib", "cuda", "cuda_ipc"} & {
            name for name in tls[1:].split(",") if transports.fullmatch(name)
        }
    names = [name.lstrip("\\") for name in tls.split(",")]
    return tls in ("", "all") or any(map(transports.fullmatch, names))


# Switches


def _asked(spec: WorkerSpec) -> str:
    return ", ".join(option_name(name) for name in SWITCHES if getattr(spec, name))


def _check_switches(spec: WorkerSpec) -> None:
    """Refuse switches of UCX that contradict each other."""
    if spec.enable_rdmacm and spec.enable_infiniband is False:
        raise UsageError(
            "--enable-rdmacm connects by RDMA and --disable-infiniband forbids it: leave one out"
        )
    closed = spec.enable_infiniband is False or (
        spec.enable_nvlink is True and spec.enable_infiniband is None
    )
    if spec.enable_tcp_over_ucx is False and closed:
        raise UsageError(
            "--disable-tcp-over-ucx leaves UCX nothing to open connections with: it needs tcp or "
            "InfiniBand. Give --enable-infiniband with it, or leave it out"
        )


def ucx_environment(spec: WorkerSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for a worker's environment, to be set before UCX starts.

    Without switches there are none, and UCX chooses. ``--enable-nvlink`` or
    ``--enable-infiniband`` limits UCX to what is enabled and what it needs to open connections: UCX
    finds no way to another process without tcp or InfiniBand, even where shared memory would do.
    ``--disable-...`` alone takes a transport out of UCX's choice.

    Parameters
    ----------
    spec
        The worker's options.
    environ
        The worker's environment; what it sets is left as it is.

    Raises
    ------
    UsageError
        The switches contradict each other.
    """
    _check_switches(spec)
    cuda = spec.device != "cpu"
    found: dict[str, str] = {}
    if spec.enable_nvlink or spec.enable_infiniband:
        # distributed-ucxx makes a CUDA context wherever UCX_TLS names cuda, so not on the CPU
        tls = ["self", "sm"]
        tls += ["cuda_copy"] if cuda else []
        tls += ["cuda_ipc"] if spec.enable_nvlink and cuda else []
        tls += ["ib"] if spec.enable_infiniband else []
        tls += ["tcp"] if spec.enable_tcp_over_ucx is not False else []
        found["UCX_TLS"] = ",".join(tls)
    else:
        # distributed-ucxx takes "cuda" for wanted unless the text has "^cuda", so it comes first
        out = ["cuda_ipc"] if spec.enable_nvlink is False else []
        out += ["ib"] if spec.enable_infiniband is False else []
        out += ["tcp"] if spec.enable_tcp_over_ucx is False else []
        if out:
            found["UCX_TLS"] = "^" + ",".join(out)
    if spec.enable_rdmacm:
        found["UCX_SOCKADDR_TLS_PRIORITY"] = "rdmacm"
    elif spec.enable_rdmacm is False or spec.enable_infiniband is False:
        found["UCX_SOCKADDR_TLS_PRIORITY"] = "tcp"
    return {name: value for name, value in found.items() if name not in environ}


# Interfaces


def choose_interface(spec: WorkerSpec, nodes: Sequence[Seat]) -> dict[str, str]:
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


def _of_kind(seat: Seat, kind: str) -> dict[str, int]:
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
