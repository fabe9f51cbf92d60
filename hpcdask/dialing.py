"""Over which network interfaces UCX can open connections.

UCX opens one over tcp on an interface, or by RDMA on one that has an InfiniBand port behind it;
what carries the data afterwards is another matter. The user's ``UCX_*`` may leave out either. It
then refuses addresses of the other interfaces, or waits for an answer that cannot come.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch

from . import fabric
from .fabric import Fabric, Interface, Port
from .installed import Ucx, installed_ucx
from .switches import allows

#: What decides it: the transports, the network devices, and who opens connections.
VARIABLES = ("UCX_TLS", "UCX_NET_DEVICES", "UCX_SOCKADDR_TLS_PRIORITY")
LOOPBACK = "lo"
#: The fast ones first.
KINDS = ("infiniband", "slingshot", "ethernet", "other")


def ways(
    interfaces: Iterable[Interface],
    ports: Iterable[Port],
    transports: Iterable[str],
    settings: Mapping[str, str],
) -> set[str]:
    """The names of the interfaces that UCX can use, the loopback perhaps among them.

    Where it is not clear over which one a port is reached, all of them count.

    Parameters
    ----------
    interfaces, ports
        Of the node.
    transports
        As `installed.Ucx` has them.
    settings
        Those of `VARIABLES` that are set.
    """
    tls, devices, managers = (settings.get(name, "") for name in VARIABLES)
    by_kind = {one.name: one.kind for one in interfaces}
    found: set[str] = set()
    if allows(tls, "tcp") and _manages(managers, "tcp"):
        found |= {name for name in (LOOPBACK, *by_kind) if named(devices, name)}
    if "ib" in transports and allows(tls, "infiniband") and _manages(managers, "rdmacm"):
        for port in ports:
            if port.usable and named(devices, port.name):
                # bonds, bridges and the like are on top of a port's own
                ip = {name for name, kind in by_kind.items() if kind == "infiniband"}
                found |= (set(port.interfaces) & set(by_kind)) or ip or set(by_kind)
    return found


def settings(ucx: Ucx) -> dict[str, str]:
    """Those of `VARIABLES` that the user has set."""
    values = (ucx.tls, ucx.devices, ucx.managers)
    return {name: value for name, value in zip(VARIABLES, values, strict=True) if value}


def closed(node: Fabric, given: Mapping[str, str], *, far: bool) -> list[str]:
    """Which settings leave UCX no interface; empty where it has one.

    Parameters
    ----------
    node
        What there is.
    given
        Those of `VARIABLES` that are set.
    far
        Whether it has to reach other nodes.

    Returns
    -------
    list of str
        As ``UCX_TLS=sm``: those that do it alone, or all of them.
    """
    loopback = {LOOPBACK} if far else set()

    def shut(some: Mapping[str, str]) -> bool:
        there = ways(node.interfaces, node.infiniband, node.ucx.transports, some)
        return not there - loopback

    if not given or not shut(given):
        return []
    alone = [name for name, value in given.items() if shut({name: value})]
    return [f"{name}={given[name]}" for name in alone or given]


def named(devices: str, name: str) -> bool:
    """Whether the user's ``UCX_NET_DEVICES`` lets UCX use an interface or a port.

    Parameters
    ----------
    devices
        Empty for all. Patterns that are not understood here count as met.
    name
        Such as ``eth0`` or ``mlx5_0:1``.
    """
    listed = [entry.strip() for entry in devices.lstrip("^").split(",") if entry.strip()]
    if not listed or "all" in listed:
        return True
    forms = {name, name.partition(":")[0]}
    met = any("~" in entry or any(fnmatch(form, entry) for form in forms) for entry in listed)
    return met != devices.startswith("^")


def _manages(managers: str, name: str) -> bool:
    listed = managers.split(",")
    return not managers or "all" in listed or any(fnmatch(name, entry) for entry in listed)


def host(address: str, environ: Mapping[str, str] | None = None) -> str:
    """The address of this node at which UCX can be reached.

    Parameters
    ----------
    address
        That at which the worker is reached over tcp. It is taken for UCX too unless settings of
        the user or of the worker's options keep UCX from its interface.
    environ
        The worker's environment; default: this process's.
    """
    environ = os.environ if environ is None else environ
    settings = {name: value for name in VARIABLES if (value := environ.get(name))}
    if not settings:
        return address
    known = fabric.interfaces(every=True)
    transports = installed_ucx("/", environ).transports
    usable = ways(known, fabric.infiniband(), transports, settings)
    here = {one.name for one in known if one.address == address}
    others = [one for one in fabric.interfaces() if one.name in usable]
    others = others or [one for one in known if one.name == LOOPBACK and one.name in usable]
    if not here or here & usable or not others:
        return address
    return min(others, key=lambda one: (KINDS.index(one.kind), -one.speed, one.name)).address
