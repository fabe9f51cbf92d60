"""Links of nodes and GPUs: their use by UCX, settings that prevent it, and free ports."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING

from hpcdask.comm.fabric import Fabric
from hpcdask.comm.transport import USE_SYSTEM
from hpcdask.comm.ucx_config import PREFER_SYSTEM
from hpcdask.logs import plural
from hpcdask.security import ports
from hpcdask.spec.records import Record

from .host import SLOW_SETTINGS, ProcessFacts
from .report import Finding, slow

if TYPE_CHECKING:
    from .nodes import Node

finding = partial(Finding, "network")
TLS, DEVICES = "UCX_TLS", "UCX_NET_DEVICES"


def check(known: Fabric, node: Node) -> Iterator[Finding]:
    """Yield findings on one node's links."""
    names = [f"{one.name} {one.address} {one.kind}{_speed(one.speed)}" for one in known.interfaces]
    if names:
        yield finding("interfaces", "ok", ", ".join(names))
    else:
        advice = "A cluster can only be on this node: see ip addr"
        yield finding("interfaces", "warning", "none that leads to other nodes", advice)
    yield from _infiniband(known)
    yield from _ucx(known, has_gpus=bool(node.gpus))


def _speed(megabits: int) -> str:
    return f" {megabits / 1000:g} Gb/s" if megabits else ""


def _usable(known: Fabric) -> list[str]:
    return [f"{p.name}{_speed(p.speed)}{' (RoCE)' * p.roce}" for p in known.infiniband if p.usable]


def _infiniband(known: Fabric) -> Iterator[Finding]:
    usable = ", ".join(_usable(known))
    idle = ", ".join(f"{p.name} {p.state}" for p in known.infiniband if p.state != "ACTIVE")
    shut = ", ".join(p.name for p in known.infiniband if p.state == "ACTIVE" and not p.accessible)
    if shut:
        advice = "Start the container with the devices in /dev/infiniband, or request them"
        yield finding("InfiniBand", "warning", f"{shut} cannot be opened", advice)
    if usable:
        yield finding("InfiniBand", "ok", usable, idle and f"Not active: {idle}")
    elif idle and not shut:
        advice = "No port is active: tell the site's staff if it should be"
        yield finding("InfiniBand", "warning", idle, advice)


def _ucx(known: Fabric, *, has_gpus: bool) -> Iterator[Finding]:
    ucx, usable = known.ucx, _usable(known)
    if ucx.problem and has_gpus and (known.nvlink or usable):
        value = "cannot be used, so NVLink and InfiniBand are not"
        yield finding("UCX", "warning", value, ucx.problem)
    elif ucx.problem:
        yield finding("UCX", "ok", "not used", ucx.problem if has_gpus else "")
    else:
        where = "the system's" if ucx.source == "system" else "its package's"
        built_in = ", ".join(("tcp", "shared memory", *ucx.transports))
        yield finding("UCX", "ok", f"{ucx.ucx} ({where}) with {built_in}")
        if has_gpus and "cuda" not in ucx.transports:
            value = "this UCX has no CUDA transport, so GPU memory and NVLink are not used"
            advice = f"Use that of the package: unset {PREFER_SYSTEM}"
            yield slow("network", "UCX and NVLink", value, advice)
        if "ib" not in ucx.transports and usable:
            value = "this UCX has no InfiniBand transport, and goes over tcp between nodes"
            advice = f"UCX from PyPI has none: {USE_SYSTEM}"
            yield slow("network", "UCX and InfiniBand", value, advice)


def check_settings(process: ProcessFacts, node: Node) -> Iterator[Finding]:
    """Yield findings on the user's settings, in one rank, that slow things down."""
    settings = {**process.env, **process.config}
    for name, (pattern, lost, advice) in SLOW_SETTINGS.items():
        value = str(settings.get(name, ""))
        if re.match(pattern, value, re.IGNORECASE):
            yield slow("settings", name, f"with {value}, {lost}", advice)
    if known := node.facts.fabric:
        yield from _tls(process.env.get(TLS, ""), known, node)
        yield from _devices(process.env.get(DEVICES, ""), known)
    if process.env:
        values = " ".join(f"{name}={value}" for name, value in sorted(process.env.items()))
        yield Finding("settings", "variables", "ok", values)


def _tls(transports: str, known: Fabric, node: Node) -> Iterator[Finding]:
    """Yield a finding on the links that ``UCX_TLS`` leaves out in one rank."""
    ucx = dataclasses.replace(known.ucx, tls=transports)
    wanted = {
        "NVLink is not used (no cuda_ipc)": ("nvlink", node.gpus and known.nvlink),
        "GPU memory is not sent by UCX (no cuda_copy)": ("copies", node.gpus),
        "InfiniBand is not used (no rc)": ("infiniband", _usable(known)),
    }
    lost = [text for text, (part, there) in wanted.items() if there and not ucx.permits(part)]
    if lost:
        advice = "Unset UCX_TLS and let UCX choose, or add what is missing"
        yield slow("settings", TLS, f"with {transports}, {', '.join(lost)}", advice)


def _devices(devices: str, known: Fabric) -> Iterator[Finding]:
    """Yield a finding on ``UCX_NET_DEVICES`` that leaves out InfiniBand."""
    named = any(port.name.partition(":")[0] in devices for port in known.infiniband)
    if devices and _usable(known) and not named and not re.search("all|[*?^~]", devices):
        advice = f"Unset it, or name a port: {', '.join(_usable(known))}"
        yield slow("settings", DEVICES, f"with {devices}, InfiniBand is not used", advice)


@dataclasses.dataclass(frozen=True)
class PortFacts(Record):
    """Range of ports in use, with the number of its ports and of the free ones."""

    range: str
    size: int
    free: int

    @classmethod
    def read(cls) -> PortFacts | None:
        """Try all ports of the range, if there is one."""
        if (port_range := ports.current()) is None:
            return None
        free = 0
        for port in (every := ports.ports_of(port_range)):
            with contextlib.suppress(OSError):
                ports.check_free(port)
                free += 1
        return cls(port_range, len(every), free)


def check_range(known: PortFacts, node: Node) -> Iterator[Finding]:
    """Yield a finding on whether the ports are enough for the workers of this node."""
    left = max(0, known.free - ports.PER_SCHEDULER)
    workers, with_ucx = left // ports.PER_WORKER, left // ports.PER_UCX_WORKER
    value = f"{known.range}: {known.free} of {known.size} ports are free, enough for the scheduler "
    value += f"and {plural(workers, 'worker')}, with ucx {with_ucx}"
    if workers >= node.workers:
        yield finding("port range", "ok", value)
    else:
        advice = f"This node has {plural(node.workers, 'worker')}: give a wider range"
        yield finding("port range", "error", value, advice)
