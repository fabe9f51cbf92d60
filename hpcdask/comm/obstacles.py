"""Obstacles to ucx, NVLink or InfiniBand: one list, which transport and doctor read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hpcdask.logs import plural, some

from . import ucx_config
from .topology import Topology
from .ucx_config import Link
from .ucx_install import PREFER_SYSTEM

#: ``fatal``: ucx cannot work, or not as it was asked for; ``slow``: a link is not used; ``none``:
#: there is no such link, or no worker to use it.
Severity = Literal["fatal", "slow", "none"]
Kind = Literal[
    "workers", "alone", "package", "cuda", "ib", "allocator", "setting", "confined", "hardware",
]  # fmt: skip

ASYNC = (
    "--rmm-async: memory of CUDA's asynchronous allocator cannot be shared between processes, and "
    "ucx then copies it at 0.24 to 0.37 GB/s"
)
NO_NVLINK = {"unknown": "NVML does not tell whether NVLink joins", "none": "NVLink does not join"}
NO_IPC = "by a cgroup or a container, so CUDA IPC and NVLink do not work between"
USE_SYSTEM = (
    f"set {PREFER_SYSTEM}=true on all nodes with a UCX of the system or of conda that has "
    f"InfiniBand (with its ucx_info on PATH)"
)


@dataclass(frozen=True)
class Obstacle:
    """A fact that keeps workers from ucx or from a link.

    `text` is a sentence for the user; `remedy` says what to do where the text does not. `link` is
    the link that is lost, empty for ucx as a whole. `effect` is what is lost, for the doctor.
    """

    kind: Kind
    severity: Severity
    text: str
    remedy: str = ""
    link: Link | Literal[""] = ""
    effect: str = ""

    @property
    def line(self) -> str:
        """The text with its remedy."""
        return f"{self.text}: {self.remedy}" if self.remedy else self.text


def obstacles(site: Topology) -> list[Obstacle]:
    """Return all obstacles of these workers; of each severity and link the first one counts."""
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
    """Yield why NVLink does not join the GPUs inside a node; nothing with ``--enable-nvlink``."""
    if site.spec.enable_nvlink:
        return
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


def _left_out(site: Topology, link: Link) -> Iterator[Obstacle]:
    """Yield the options and settings that leave out a link."""
    name, transport = {"nvlink": ("NVLink", "cuda_ipc"), "infiniband": ("InfiniBand", "rc")}[link]
    for seat in site.seats:
        known = seat.fabric
        if setting := ucx_config.excluded_by(site.spec, known.ucx.tls, link):
            usable = any(port.usable for port in known.infiniband)
            effect = f"{name} is not used (no {transport})"
            if not (usable if link == "infiniband" else seat.gpus):
                effect = ""
            elif link == "nvlink" and not known.nvlink:
                effect = "GPUs of a node do not reach one another (no cuda_ipc)"
            where = f" on {seat.host}" if known.ucx.tls else ""
            yield Obstacle(
                "setting", "slow", f"{setting}{where} leaves out {name}", "", link, effect
            )


def _confined(site: Topology) -> Iterator[Obstacle]:
    """Yield the workers of one node that cannot map each other's memory."""
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
    """Yield why InfiniBand does not join the nodes."""
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
        yield Obstacle("hardware", "slow", why, "they need /dev/infiniband", "infiniband")
    roce = site.where(lambda fabric: any(p.usable and p.roce for p in fabric.infiniband))
    if without and len(roce) == len(site.hosts):
        remedy = "--protocol ucx uses them, if the network suits and UCX has InfiniBand"
        yield Obstacle("hardware", "slow", "the nodes have RoCE ports", remedy, "infiniband")


def _of_ucx(site: Topology) -> Iterator[Obstacle]:
    """Yield what makes ucx impossible."""
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
    for seat in site.seats:
        ucx, tls = seat.fabric.ucx, seat.fabric.ucx.tls
        if seat.gpus and not ucx_config.permits(tls, "copies"):
            why = f"UCX_TLS={tls} on {seat.host} leaves out cuda_copy, so GPU memory is not sent"
            lost = "GPU memory is not sent by UCX (no cuda_copy)"
            yield Obstacle("setting", "fatal", why, effect=lost)
        rdma = "ib" in ucx.transports and ucx_config.permits(tls, "infiniband")
        if not rdma and not ucx_config.permits(tls, "tcp"):
            why = f"UCX_TLS={tls} on {seat.host} leaves UCX nothing to open connections with"
            lost = "workers open no connection by UCX (no tcp, no InfiniBand)" if seat.gpus else ""
            yield Obstacle("setting", "fatal", why, "add tcp", effect=lost)
    if site.spec.rmm_async and any(seat.gpus for seat in site.seats):
        yield Obstacle("allocator", "fatal", ASYNC)
