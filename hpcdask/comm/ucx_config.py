"""What UCX may use: the options, the user's own ``UCX_TLS``, and the variables for a worker."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from typing import Literal

from hpcdask.errors import UsageError
from hpcdask.spec.argv import negative, option_name
from hpcdask.spec.specs import WorkerSpec

from . import fabric
from .fabric import Fabric, Interface, Port
from .ucx_install import UcxInstall, installed_ucx

Link = Literal["nvlink", "infiniband", "tcp"]
#: What a `UCX_TLS` may leave out: a link, or the copies without which UCX sends no GPU memory.
Part = Literal["copies"] | Link
SWITCHES = ("enable_nvlink", "enable_infiniband", "enable_rdmacm", "enable_tcp_over_ucx")
#: Their names in `UCX_TLS`.
NAMES: dict[Part, re.Pattern[str]] = {
    "copies": re.compile(r"cuda|cuda_copy"),
    "nvlink": re.compile(r"cuda|cuda_ipc"),
    "infiniband": re.compile(r"ib|(rc|dc|ud)(_\w+)?"),
    "tcp": re.compile("tcp"),
}
#: Those that `UCX_TLS` must take out to leave nothing of a part.
WHOLE = ({"ib"}, {"rc", "dc", "ud"}, {"cuda"}, {"cuda_copy"}, {"cuda_ipc"}, {"tcp"})


def explicit_flags(spec: WorkerSpec, *, wanted: bool | None = None) -> str:
    """The switches that are given, as options; with `wanted`, only those to enable or disable."""
    found = [
        option_name(name) if value else negative(option_name(name))
        for name in SWITCHES
        if (value := getattr(spec, name)) is not None and wanted in (None, value)
    ]
    return ", ".join(found)


def check(spec: WorkerSpec) -> None:
    """Refuse switches that contradict each other, naming one to leave out."""
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


def excluded_by(spec: WorkerSpec, tls: str, link: Link) -> str:
    """Which setting keeps UCX from a link; empty where none does.

    The user's ``UCX_TLS`` counts more than the options; empty for none.
    """
    if tls:
        return "" if permits(tls, link) else f"UCX_TLS={tls}"
    switch = f"enable_{link}"
    other = "enable_infiniband" if link == "nvlink" else "enable_nvlink"
    if getattr(spec, switch) is False:
        return negative(option_name(switch))
    if getattr(spec, other) and getattr(spec, switch) is None:
        return f"{option_name(other)} without {option_name(switch)}"
    return ""


def permits(tls: str, part: Part) -> bool:
    """Whether a value of ``UCX_TLS``, empty for none, leaves UCX a transport of a part."""
    if not tls:
        return True
    if tls.startswith("^"):  # a single one of InfiniBand's leaves the others
        out = {name for name in tls[1:].split(",") if NAMES[part].fullmatch(name)}
        return not any(whole <= out for whole in WHOLE)
    names = [name.lstrip("\\") for name in tls.split(",")]
    return "all" in names or any(map(NAMES[part].fullmatch, names))


def ucx_environment(spec: WorkerSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """The variables for a worker's environment, to be set before UCX starts; the user's own stay.

    Without options there are none, and UCX chooses. ``--enable-nvlink`` or ``--enable-infiniband``
    limits UCX to what is enabled and what it needs to open connections: UCX finds no way to another
    process without tcp or InfiniBand, even where shared memory would do. ``--disable-...`` alone
    takes a transport out of UCX's choice.
    """
    check(spec)
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
    if spec.port_range is not None:  # of the data's own connections, since UCX 1.16
        found["UCX_TCP_PORT_RANGE"] = spec.port_range
    return {name: value for name, value in found.items() if name not in environ}


#: What decides it: the transports, the network devices, and who opens connections.
VARIABLES = ("UCX_TLS", "UCX_NET_DEVICES", "UCX_SOCKADDR_TLS_PRIORITY")
LOOPBACK = "lo"
#: The fast ones first.
KINDS = ("infiniband", "slingshot", "ethernet", "other")


def reachable_interfaces(
    interfaces: Iterable[Interface],
    ports: Iterable[Port],
    transports: Iterable[str],
    settings: Mapping[str, str],
) -> set[str]:
    """The names of the interfaces that UCX can use, the loopback perhaps among them.

    Transports are as `UcxInstall` has them, settings those of `VARIABLES` that are set. Where it is
    not clear over which one a port is reached, all of them count.
    """
    tls, devices, managers = (settings.get(name, "") for name in VARIABLES)
    by_kind = {one.name: one.kind for one in interfaces}
    found: set[str] = set()
    if permits(tls, "tcp") and _manages(managers, "tcp"):
        found |= {name for name in (LOOPBACK, *by_kind) if device_allowed(devices, name)}
    if "ib" in transports and permits(tls, "infiniband") and _manages(managers, "rdmacm"):
        for port in ports:
            if port.usable and device_allowed(devices, port.name):
                # bonds, bridges and the like are on top of a port's own
                ip = {name for name, kind in by_kind.items() if kind == "infiniband"}
                found |= (set(port.interfaces) & set(by_kind)) or ip or set(by_kind)
    return found


def settings(ucx: UcxInstall) -> dict[str, str]:
    """Those of `VARIABLES` that the user has set."""
    values = (ucx.tls, ucx.devices, ucx.managers)
    return {name: value for name, value in zip(VARIABLES, values, strict=True) if value}


def blocking_settings(node: Fabric, given: Mapping[str, str], *, far: bool) -> list[str]:
    """Which settings leave UCX no interface, to other nodes if far; empty where it has one.

    As ``UCX_TLS=sm``: those of `VARIABLES` that do it alone, or all that are set.
    """
    loopback = {LOOPBACK} if far else set()

    def shut(some: Mapping[str, str]) -> bool:
        there = reachable_interfaces(node.interfaces, node.infiniband, node.ucx.transports, some)
        return not there - loopback

    if not given or not shut(given):
        return []
    alone = [name for name, value in given.items() if shut({name: value})]
    return [f"{name}={given[name]}" for name in alone or given]


def device_allowed(devices: str, name: str) -> bool:
    """Whether ``UCX_NET_DEVICES``, empty for all, lets UCX use ``eth0``, ``mlx5_0:1`` and the like.

    Patterns that are not understood here count as met.
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

    That of tcp, unless settings of the user or of the worker's options keep UCX from its interface.
    """
    environ = os.environ if environ is None else environ
    settings = {name: value for name in VARIABLES if (value := environ.get(name))}
    if not settings:
        return address
    known = fabric.interfaces(every=True)
    transports = installed_ucx("/", environ).transports
    usable = reachable_interfaces(known, fabric.infiniband(), transports, settings)
    here = {one.name for one in known if one.address == address}
    others = [one for one in fabric.interfaces() if one.name in usable]
    others = others or [one for one in known if one.name == LOOPBACK and one.name in usable]
    if not here or here & usable or not others:
        return address
    return min(others, key=lambda one: (KINDS.index(one.kind), -one.speed, one.name)).address
