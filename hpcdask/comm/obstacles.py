"""What keeps workers from ucx, NVLink or InfiniBand: one list, which transport and doctor read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hpcdask.logs import plural, some

from . import ucx_config
from .topology import Topology
from .ucx_config import VARIABLES, Link
from .ucx_install import PREFER_SYSTEM

#: ``fatal``: ucx cannot work, or not as it was asked for; ``slow``: a link is not used; ``none``:
#: there is no such link, or nobody to use it.
Severity = Literal["fatal", "slow", "none"]
Kind = Literal[
    "workers", "alone", "package", "cuda", "ib", "rdmacm", "port", "interface", "allocator",
    "setting", "confined", "hardware", "closed", "roce",
]  # fmt: skip

ASYNC = (
    "--rmm-async: memory of CUDA's asynchronous allocator cannot be shared between processes, and "
    "ucx then copies it at 0.24 to 0.37 GB/s"
)
NO_NVLINK = {"unknown": "NVML does not tell whether NVLink joins", "none": "NVLink does not join"}
NO_IPC = "by a cgroup or a container, so CUDA IPC and NVLink do not work between"
NO_PEERS = "GPUs of a node do not reach one another"
NO_WAY = "nothing to open connections with: it needs tcp on a network interface, or InfiniBand"
UNREACHABLE = "workers open no connection by UCX (no tcp on an interface, no InfiniBand)"
NO_COPIES = "leaves out cuda_copy, without which UCX cannot send GPU memory"
USE_SYSTEM = (
    f"set {PREFER_SYSTEM}=true on all nodes with a UCX of the system or of conda that has "
    f"InfiniBand (its libucp.so must be in LD_LIBRARY_PATH or known to the loader)"
)


@dataclass(frozen=True)
class Obstacle:
    """One thing that stands in the way.

    `text` is a sentence for the user, `remedy` what to do about it, where that is not in it. `link`
    is the one that is not used because of it, empty where it is not about one. `settings` are the
    user's variables that cause it. `effect` is for the doctor: what is lost, in a few words.
    """

    kind: Kind
    severity: Severity
    text: str
    remedy: str = ""
    link: Link | Literal[""] = ""
    settings: tuple[str, ...] = ()
    effect: str = ""

    @property
    def line(self) -> str:
        """What it is, and what to do."""
        return f"{self.text}: {self.remedy}" if self.remedy else self.text


def obstacles(site: Topology) -> list[Obstacle]:
    """All that stands in the way of these workers; of each severity and link the first counts."""
    return [*_of_workers(site), *_of_nvlink(site), *_of_infiniband(site), *_of_ucx(site)]


def _of_workers(site: Topology) -> Iterator[Obstacle]:
    blind = [seat.host for seat in site.seats if not seat.gpus]
    if len(blind) == len(site.seats):
        yield Obstacle("workers", "none", "workers compute on the CPU")
    elif blind:
        yield Obstacle("workers", "none", f"not every worker has a GPU: none on {some(blind)}")
    if sum(max(1, len(seat.gpus)) for seat in site.seats) == 1 and not site.alone:
        yield Obstacle("alone", "none", "a single worker has no other to exchange data with")


def _of_nvlink(site: Topology) -> Iterator[Obstacle]:
    """Why NVLink does not join the GPUs inside a node."""
    if site.mig:
        why = "MIG slices cannot share memory with each other: neither CUDA IPC nor NVLink"
        yield Obstacle("hardware", "none", why, link="nvlink")
    yield from _left_out(site, "nvlink")
    yield from _confined(site)
    if all(len(site.partners(host)) < 2 for host in site.hosts):
        why = "no node has two GPUs that NVLink could join"
        if len(site.hosts) == 1:
            why = f"there is one GPU only on {min(site.hosts)}, so nothing that NVLink could join"
        yield Obstacle("hardware", "none", why, link="nvlink")
    for host in site.hosts:
        if why := NO_NVLINK.get(site.nvlink(host), ""):
            yield Obstacle("hardware", "none", f"{why} the GPUs of {host}", link="nvlink")


def _left_out(site: Topology, link: Literal["nvlink", "infiniband"]) -> Iterator[Obstacle]:
    """The options and settings that leave out a link."""
    name = {"nvlink": "NVLink", "infiniband": "InfiniBand"}[link]
    for seat in site.seats:
        known, effect = seat.fabric, ""
        if setting := ucx_config.excluded_by(site.spec, known.ucx.tls, link):
            if link == "infiniband" and any(port.usable for port in known.infiniband):
                effect = "InfiniBand is not used (no rc)"
            elif link == "nvlink" and seat.gpus:
                lost = "NVLink is not used" if known.nvlink else NO_PEERS
                effect = f"{lost} (no cuda_ipc)"
            own = ("UCX_TLS",) if known.ucx.tls else ()
            why = f"{setting}{f' on {seat.host}' if own else ''} leaves out {name}"
            yield Obstacle("setting", "slow", why, "", link, own, effect)


def _confined(site: Topology) -> Iterator[Obstacle]:
    """Workers of one node that cannot map each other's memory."""
    remedy = "let jobs have whole nodes"
    if site.alone:
        count, host = max((seat.fabric.hidden_gpus, seat.host) for seat in site.seats)
        if count:
            what = f"{plural(count, 'GPU')} of {host} {'is' if count == 1 else 'are'}"
            why = f"{what} kept from this job {NO_IPC} it and other jobs there"
            yield Obstacle("confined", "slow", why, remedy, "nvlink")
    elif hosts := site.confined():
        why = f"workers on {some(hosts)} are confined to their GPUs {NO_IPC} them"
        remedy += ", or start the ranks with --gpu-bind=none"
        lost = "a cgroup keeps the ranks from each other's GPUs"
        yield Obstacle("confined", "slow", why, remedy, "nvlink", effect=lost)


def _of_infiniband(site: Topology) -> Iterator[Obstacle]:
    """Why InfiniBand does not join the nodes."""
    yield from _left_out(site, "infiniband")
    without, lacking = site.without_port(), site.lacking("ib")
    if without and (slingshot := site.slingshot()):
        wanted = site.spec.interface in ("auto", slingshot)
        way = slingshot if wanted else f"with --interface {slingshot}"
        why = f"UCX has no transport for Slingshot, which tcp can use ({way})"
        yield Obstacle("hardware", "none", why, link="infiniband")
    elif without:
        why = f"no usable InfiniBand on {some(without)}"
        yield Obstacle("hardware", "none", why, link="infiniband")
    there = site.where(lambda fabric: any(port.usable for port in fabric.infiniband))
    if unused := [host for host in lacking if host in there]:
        why = f"the UCX on {some(unused)} cannot use the InfiniBand there"
        severity: Severity = "none" if without else "slow"
        lost = "this UCX has no InfiniBand transport, and goes over tcp between nodes"
        yield Obstacle("ib", severity, why, USE_SYSTEM, "infiniband", effect=lost)
    shut = site.where(lambda fabric: any(port.closed for port in fabric.infiniband))
    if shut := [host for host in shut if host in without]:
        why = f"InfiniBand of {some(shut)} is closed to the workers"
        yield Obstacle("closed", "slow", why, "they need /dev/infiniband", "infiniband")
    roce = site.where(lambda fabric: any(p.usable and p.roce for p in fabric.infiniband))
    if without and len(roce) == len(site.hosts):
        switches = "--enable-infiniband"
        switches += "" if any(_of_nvlink(site)) else " --enable-nvlink"
        first = f", with a UCX that has InfiniBand ({USE_SYSTEM})" if lacking else ""
        remedy = f"{switches} uses them{first}, if the network suits"
        yield Obstacle("roce", "slow", "the nodes have RoCE ports", remedy, "infiniband")
    for seat in site.seats:
        ports = [port.name for port in seat.fabric.infiniband if port.usable]
        devices = seat.fabric.ucx.devices
        if ports and not any(ucx_config.device_allowed(devices, name) for name in ports):
            why = f"UCX_NET_DEVICES={devices} on {seat.host} names no port of InfiniBand"
            lost = "InfiniBand is not used"
            # a setting that the choice of a transport does not look at
            yield Obstacle("setting", "slow", why, settings=(VARIABLES[1],), effect=lost)


def _of_ucx(site: Topology) -> Iterator[Obstacle]:
    """What makes ucx impossible, or does not give what was asked for."""
    spec = site.spec
    for problem in dict.fromkeys(seat.fabric.ucx.problem for seat in site.seats):
        if problem:
            broken = [seat.host for seat in site.seats if seat.fabric.ucx.problem == problem]
            yield Obstacle("package", "fatal", f"on {some(broken)}, {problem}")
    if site.cuda and (lacking := site.lacking("cuda")):
        why = f"the UCX on {some(lacking)} has no transport for CUDA"
        joined = any(seat.fabric.nvlink for seat in site.seats)
        lost = "its NVLink is not used" if joined else "GPU memory cannot be sent"
        lost = f"this UCX has no CUDA transport, so {lost}"
        yield Obstacle("cuda", "fatal", why, "use one that has it", effect=lost)
    if spec.enable_infiniband and (without := site.without_port()):
        why = f"--enable-infiniband, and there is no usable port on {some(without)}"
        yield Obstacle("port", "fatal", why)
    if spec.enable_infiniband and (lacking := site.lacking("ib")):
        why = f"the UCX on {some(lacking)} has no InfiniBand"
        yield Obstacle("ib", "fatal", why, USE_SYSTEM)
    if spec.enable_rdmacm and (lacking := site.lacking("rdmacm")):
        why = f"the UCX on {some(lacking)} cannot connect by RDMA (rdmacm)"
        yield Obstacle("rdmacm", "fatal", why, USE_SYSTEM)
    yield from _unreachable(site)
    for seat in site.seats:
        tls = seat.fabric.ucx.tls
        if seat.gpus and not ucx_config.permits(tls, "copies"):
            why = f"UCX_TLS={tls} on {seat.host} {NO_COPIES}"
            lost = "GPU memory is not sent by UCX (no cuda_copy)"
            yield Obstacle("setting", "fatal", why, settings=("UCX_TLS",), effect=lost)
    if spec.rmm_async and any(seat.gpus for seat in site.seats):
        yield Obstacle("allocator", "fatal", ASYNC)


def _unreachable(site: Topology) -> Iterator[Obstacle]:
    """Settings that leave UCX no interface to open connections over."""
    shut: dict[tuple[str, ...], list[str]] = {}
    for seat in site.seats:
        own = ucx_config.settings(seat.fabric.ucx)
        given = {**ucx_config.ucx_environment(site.spec, own), **own}
        closed = ucx_config.blocking_settings(seat.fabric, given, far=site.others)
        if closed and not seat.fabric.ucx.problem:
            named = tuple(one for one in closed if one.partition("=")[0] in own)
            shut.setdefault(named, []).append(seat.host)
    for named, hosts in shut.items():
        what = " and ".join(named) or ucx_config.explicit_flags(site.spec)
        names = tuple(one.partition("=")[0] for one in named)
        why = f"{what} leaves UCX on {some(hosts)} {NO_WAY}"
        lost = UNREACHABLE if any(seat.gpus for seat in site.seats) else ""
        yield Obstacle("interface", "fatal", why, settings=names, effect=lost)
