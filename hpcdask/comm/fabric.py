"""Links of the GPUs and the nodes, and which of them the installed UCX can use.

Everything is read from files, psutil and NVML: no CUDA call, and UCX is not loaded, so that the
process can still fork. Nothing here decides; `hpcdask.comm.transport` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import itertools
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from hpcdask.gpu.devices import whole_gpus
from hpcdask.gpu.driver import hidden_gpus, read
from hpcdask.spec.records import Record

from .ucx_install import UcxInstall, installed_ucx

Kind = Literal["infiniband", "slingshot", "ethernet", "other"]

#: Types of network interfaces in sysfs, from Linux's if_arp.h.
ETHERNET, INFINIBAND = 1, 32
#: Bridges of container and virtual machine software, and their ends.
VIRTUAL = re.compile(r"(docker|podman|virbr|veth|lxc|lxd|cni|cali|flannel|br-[0-9a-f]{12}$)")


@dataclass(frozen=True)
class Interface(Record):
    """A network interface with an IPv4 address, such as ``ib0`` and ``10.1.0.7``.

    Kinds are ``infiniband`` (IP over it), ``slingshot``, ``ethernet`` and ``other``; the speed is
    in Mb/s, 0 where the driver does not tell.
    """

    name: str
    address: str
    kind: Kind
    speed: int


@dataclass(frozen=True)
class Port(Record):
    """A port of an RDMA device, by the name that UCX has for it: ``mlx5_0:1``.

    The link layer is ``InfiniBand``, or ``Ethernet`` for RoCE; the state ``ACTIVE``, ``DOWN``,
    ``INIT``, ...; the speed is in Mb/s, 0 where the driver does not tell. A container often shows
    ports in sysfs that this process may not open. ``interfaces`` are the network interfaces of the
    same device.
    """

    name: str
    link_layer: str
    state: str
    speed: int
    accessible: bool
    interfaces: tuple[str, ...] = ()

    @property
    def usable(self) -> bool:
        """Return whether UCX can send through it, if it has the transport."""
        return self.state == "ACTIVE" and self.accessible

    @property
    def closed(self) -> bool:
        """Return whether only this process's rights keep UCX from it."""
        return self.state == "ACTIVE" and not self.accessible

    @property
    def roce(self) -> bool:
        """Return whether it is RDMA over Ethernet."""
        return self.link_layer == "Ethernet"


@dataclass(frozen=True)
class Fabric(Record):
    """Links of a node, as one process sees them: interfaces that are up and lead to other nodes.

    ``infiniband`` has the ports of RDMA devices, those that are down too; ``nvlink`` the pairs of
    UUIDs of GPUs that NVLink joins, also through switches, and ``nvlink_unknown`` those of which
    NVML does not tell. ``hidden_gpus`` counts those that a cgroup or a container keeps from this
    process. ``gpus`` are the UUIDs that NVML shows, or the driver's files where it is not asked,
    whatever ``CUDA_VISIBLE_DEVICES`` says, without sliced ones (MIG).
    """

    interfaces: tuple[Interface, ...] = ()
    infiniband: tuple[Port, ...] = ()
    nvlink: tuple[tuple[str, str], ...] = ()
    hidden_gpus: int = 0
    ucx: UcxInstall = dataclasses.field(default_factory=UcxInstall)
    gpus: tuple[str, ...] = ()
    nvlink_unknown: tuple[tuple[str, str], ...] = ()


def look(
    root: str = "/",
    environ: Mapping[str, str] | None = None,
    *,
    gpus: bool = True,
    own: Collection[str] | None = None,
) -> Fabric:
    """Look at everything. Missing hardware and packages are an answer, not an error.

    ``root`` stands for ``/``, and ends in one. Without ``gpus``, NVML is not asked, nor is looked
    for GPUs that are hidden; ``own`` is as of `nvlink_pairs`.
    """
    pairs = nvlink_pairs(own) if gpus else Pairs((), (), ())
    return Fabric(
        interfaces=interfaces(root),
        infiniband=infiniband(root),
        nvlink=pairs.joined,
        hidden_gpus=hidden_gpus(root) if gpus else 0,
        ucx=installed_ucx(environ),
        gpus=pairs.gpus,
        nvlink_unknown=pairs.unknown,
    )


def interfaces(root: str = "/", *, every: bool = False) -> tuple[Interface, ...]:
    """The network interfaces with an IPv4 address, by name.

    ``every``: also those that lead to no other node: loopback, bridges of containers, links that
    are down.
    """
    import socket

    import psutil

    stats = psutil.net_if_stats()
    found = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        address = next((one.address for one in addresses if one.family == socket.AF_INET), None)
        if address is None:
            continue
        stat = stats.get(name)
        local = address.startswith(("127.", "169.254."))  # also a management card's own link
        if every or (stat and stat.isup and not local and not VIRTUAL.match(name)):
            speed = stat.speed if stat and stat.speed > 0 else 0
            found.append(Interface(name, address, _kind(name, root), speed))
    return tuple(found)


def _kind(name: str, root: str) -> Kind:
    number = read(f"{root}sys/class/net/{name}/type")
    if number == str(INFINIBAND):
        return "infiniband"
    if name.startswith("hsn"):
        return "slingshot"
    return "ethernet" if number == str(ETHERNET) else "other"


def infiniband(root: str = "/") -> tuple[Port, ...]:
    """The ports of the node's RDMA devices, in the kernel's order of names."""
    verbs = {
        read(f"{folder}/ibdev"): f"{root}dev/infiniband/{os.path.basename(folder)}"
        for folder in glob.glob(f"{glob.escape(root)}sys/class/infiniband_verbs/uverbs*")
    }
    found = []
    for folder in sorted(glob.glob(f"{glob.escape(root)}sys/class/infiniband/*/ports/*")):
        device = folder.split(os.sep)[-3]
        rate = re.match(r"[\d.]+", read(f"{folder}/rate"))  # "400 Gb/sec (4X NDR)"
        found.append(
            Port(
                f"{device}:{os.path.basename(folder)}",
                read(f"{folder}/link_layer"),
                read(f"{folder}/state").partition(":")[2].strip(),  # "4: ACTIVE"
                round(float(rate[0]) * 1000) if rate else 0,
                os.access(verbs.get(device, ""), os.R_OK | os.W_OK),
                _names(f"{root}sys/class/infiniband/{device}/device/net"),
            )
        )
    return tuple(found)


def _names(folder: str) -> tuple[str, ...]:
    with contextlib.suppress(OSError):
        return tuple(sorted(os.listdir(folder)))
    return ()


class Pairs(NamedTuple):
    """GPUs that are not sliced, and which pairs of them NVLink joins, or may join."""

    gpus: tuple[str, ...]
    joined: tuple[tuple[str, str], ...]
    unknown: tuple[tuple[str, str], ...]


def nvlink_pairs(own: Collection[str] | None = None) -> Pairs:
    """Ask NVML which of the GPUs that it shows reach each other's memory over NVLink.

    A pair is unknown where the driver or NVML's package does not answer. ``own`` are the UUIDs of
    the GPUs whose pairs matter; None is all.
    """
    nothing = Pairs((), (), ())
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, or one that does not fit the other: no NVLink
        return nothing
    try:
        handles = whole_gpus(pynvml)
        answers = {
            (first, second): _nvlink(pynvml, handles[first], handles[second])
            for first, second in itertools.combinations(handles, 2)
            if own is None or first in own or second in own
        }
        joined = tuple(pair for pair, answer in answers.items() if answer)
        unknown = tuple(pair for pair, answer in answers.items() if answer is None)
        return Pairs(tuple(handles), joined, unknown)
    except pynvml.NVMLError:
        return nothing
    finally:
        pynvml.nvmlShutdown()


def _nvlink(pynvml: Any, first: Any, second: Any) -> bool | None:
    try:
        status = pynvml.nvmlDeviceGetP2PStatus(first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except (pynvml.NVMLError, AttributeError):
        return None
    return None if status == pynvml.NVML_P2P_STATUS_UNKNOWN else status == pynvml.NVML_P2P_STATUS_OK
