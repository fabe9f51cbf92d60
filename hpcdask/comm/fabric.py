"""Links of GPUs and nodes, by files, psutil and NVML: the process can still fork."""

from __future__ import annotations

import dataclasses
import glob
import itertools
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from hpcdask.gpu import nvml
from hpcdask.gpu.driver import hidden_gpus, read
from hpcdask.spec.records import Record

from .ucx_config import UcxInstall, installed_ucx

Kind = Literal["infiniband", "slingshot", "ethernet", "other"]

#: Types of network interfaces in sysfs, from Linux's if_arp.h.
KINDS: dict[str, Kind] = {"1": "ethernet", "32": "infiniband"}
#: Beginnings of addresses that lead to this host only.
LOOPBACK = ("127.", "::1")
#: Bridges of container and virtual machine software, and their ends.
VIRTUAL = re.compile(r"(docker|podman|virbr|veth|lxc|lxd|cni|cali|flannel|br-[0-9a-f]{12}$)")


@dataclass(frozen=True)
class Interface(Record):
    """A network interface with its IPv4 address; the speed is in Mb/s, 0 if that is unknown."""

    name: str
    address: str
    kind: Kind
    speed: int


@dataclass(frozen=True)
class Port(Record):
    """Port of an RDMA device as UCX names it (``mlx5_0:1``), its speed in Mb/s, or 0."""

    name: str
    link_layer: str
    state: str
    speed: int
    accessible: bool

    @property
    def usable(self) -> bool:
        """Return whether UCX can send through it, if it has the transport."""
        return self.state == "ACTIVE" and self.accessible

    @property
    def roce(self) -> bool:
        """Return whether it is RDMA over Ethernet."""
        return self.link_layer == "Ethernet"


@dataclass(frozen=True)
class Fabric(Record):
    """Links of a node, as one process sees them; ``hidden_gpus`` are kept from it by a cgroup."""

    interfaces: tuple[Interface, ...] = ()
    infiniband: tuple[Port, ...] = ()
    nvlink: tuple[tuple[str, str], ...] = ()
    hidden_gpus: int = 0
    ucx: UcxInstall = dataclasses.field(default_factory=UcxInstall)
    gpus: tuple[str, ...] = ()


def look(
    root: str = "/",
    environ: Mapping[str, str] | None = None,
    *,
    gpus: bool = True,
    own: Collection[str] | None = None,
) -> Fabric:
    """Read all links below ``root``; without ``gpus``, neither NVML nor the driver is asked."""
    shown, joined = nvlink_pairs(own) if gpus else ((), ())
    return Fabric(
        interfaces=interfaces(root),
        infiniband=infiniband(root),
        nvlink=joined,
        hidden_gpus=hidden_gpus(root) if gpus else 0,
        ucx=installed_ucx(environ),
        gpus=shown,
    )


def interfaces(root: str = "/") -> tuple[Interface, ...]:
    """Return the interfaces with IPv4 that lead to other nodes."""
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
        if stat and stat.isup and not local and not VIRTUAL.match(name):
            kind = KINDS.get(read(f"{root}sys/class/net/{name}/type"), "other")
            if kind == "ethernet" and name.startswith("hsn"):
                kind = "slingshot"
            found.append(Interface(name, address, kind, max(0, stat.speed)))
    return tuple(found)


def only_address(address: str) -> str:
    """Return the address of this machine's only network in place of a loopback address.

    Without a default route, distributed takes the host's own name, which Debian's /etc/hosts has
    at 127.0.1.1. With several networks or none the address stays.
    """
    if not address.startswith(LOOPBACK):
        return address
    found = interfaces()
    return found[0].address if len(found) == 1 else address


def unreachable(address: str, remedy: str) -> str:
    """Return a warning if a scheduler's address is one of the loopback network; else nothing."""
    if not address.startswith(LOOPBACK):
        return ""
    return (
        f"warning: the scheduler listens at {address}, which other nodes cannot reach: name this "
        f"machine's network with {remedy}"
    )


def infiniband(root: str = "/") -> tuple[Port, ...]:
    """Return the ports of the node's RDMA devices, in the kernel's order of names."""
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
            )
        )
    return tuple(found)


def nvlink_pairs(
    own: Collection[str] | None = None,
) -> tuple[tuple[str, ...], tuple[tuple[str, str], ...]]:
    """Return the GPUs that NVML shows, and the pairs with ``own`` ones that NVLink joins."""
    try:
        gpus = nvml.whole_gpus()
        joined = tuple(
            (first.uuid, second.uuid)
            for first, second in itertools.combinations(gpus, 2)
            if own is None or first.uuid in own or second.uuid in own
            if first.is_joined(second)
        )
        return tuple(one.uuid for one in gpus), joined
    except Exception:  # no package, no driver, or one that does not fit the other: no NVLink
        return (), ()
