"""Links of nodes and GPUs: their use by UCX, settings that prevent it, and free ports."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hpcdask.comm.fabric import Fabric
from hpcdask.comm.transport import USE_SYSTEM
from hpcdask.comm.ucx_config import PREFER_SYSTEM
from hpcdask.logs import plural
from hpcdask.security import ports
from hpcdask.spec.records import Record

from .findings import Finding, Reporter
from .node import ProcessFacts

if TYPE_CHECKING:
    from .nodes import Node

say, of_settings = Reporter("network"), Reporter("settings")
TLS, DEVICES = "UCX_TLS", "UCX_NET_DEVICES"


def check(known: Fabric, node: Node) -> Iterator[Finding]:
    """Yield findings on one node's links."""
    if known.interfaces:
        texts = (
            f"{one.name} {one.address} {one.kind}{_speed(one.speed)}" for one in known.interfaces
        )
        yield say.ok("interfaces", ", ".join(texts))
    else:
        advice = "A cluster can only be on this node: see ip addr"
        yield say.warning("interfaces", "none that leads to other nodes", advice)
    yield from _ports(known)
    yield from _ucx(known, has_gpus=bool(node.gpus))


def _speed(megabits: int) -> str:
    return f" {megabits / 1000:g} Gb/s" if megabits else ""


def _usable(known: Fabric) -> list[str]:
    return [f"{p.name}{_speed(p.speed)}{' (RoCE)' * p.roce}" for p in known.infiniband if p.usable]


def _ports(known: Fabric) -> Iterator[Finding]:
    topic, usable = "InfiniBand", _usable(known)
    idle = ", ".join(f"{p.name} {p.state}" for p in known.infiniband if p.state != "ACTIVE")
    shut = [p.name for p in known.infiniband if p.state == "ACTIVE" and not p.accessible]
    if shut:
        advice = "Start the container with the devices in /dev/infiniband, or request them"
        yield say.warning(topic, f"{', '.join(shut)} cannot be opened", advice)
    elif idle and not usable:
        advice = "No port is active: tell the site's staff if it should be"
        yield say.warning(topic, idle, advice)
    if usable:
        yield say.ok(topic, ", ".join(usable), f"Not active: {idle}" if idle else "")


def _ucx(known: Fabric, *, has_gpus: bool) -> Iterator[Finding]:
    ucx, usable = known.ucx, _usable(known)
    if ucx.problem:
        if has_gpus and (known.nvlink or usable):
            lost = "cannot be used, so NVLink and InfiniBand are not"
            yield say.warning("UCX", lost, ucx.problem)
        else:
            yield say.ok("UCX", "not used", ucx.problem if has_gpus else "")
        return
    built_in = ", ".join(("tcp", "shared memory", *ucx.transports))
    where = "the system's" if ucx.source == "system" else "its package's"
    yield say.ok("UCX", f"{ucx.ucx} ({where}) with {built_in}")
    if has_gpus and "cuda" not in ucx.transports:
        lost = "this UCX has no CUDA transport, so GPU memory and NVLink are not used"
        yield say.slow("UCX and NVLink", lost, f"Use that of the package: unset {PREFER_SYSTEM}")
    if "ib" not in ucx.transports and usable:
        lost = "this UCX has no InfiniBand transport, and goes over tcp between nodes"
        yield say.slow("UCX and InfiniBand", lost, f"UCX from PyPI has none: {USE_SYSTEM}")


def check_settings(process: ProcessFacts, node: Node) -> list[Finding]:
    """Return findings on the user's settings, in one rank, that slow things down."""
    found: list[Finding] = []
    if known := node.facts.fabric:
        found = [*_tls(process.env, known, node), *_devices(process.env, known)]
    found += _switches(process.env, process.config)
    reported = {finding.topic for finding in found}
    rest = [
        f"{name}={value}"
        for name, value in sorted(process.env.items())
        if name.startswith(("UCX_", "DASK_", "CUDA_VISIBLE")) and name not in reported
    ]
    if rest:
        found.append(of_settings.ok("variables", " ".join(rest)))
    return found


def _tls(environ: Mapping[str, str], known: Fabric, node: Node) -> Iterator[Finding]:
    """Yield a finding on the links that ``UCX_TLS`` leaves out in one rank."""
    ucx = dataclasses.replace(known.ucx, tls=environ.get(TLS, ""))
    wanted = {
        "NVLink is not used (no cuda_ipc)": ("nvlink", node.gpus and known.nvlink),
        "GPU memory is not sent by UCX (no cuda_copy)": ("copies", node.gpus),
        "InfiniBand is not used (no rc)": ("infiniband", _usable(known)),
    }
    lost = [text for text, (part, there) in wanted.items() if there and not ucx.permits(part)]
    if lost:
        advice = "Unset UCX_TLS and let UCX choose, or add what is missing"
        yield of_settings.slow(TLS, f"with {ucx.tls}, {', '.join(lost)}", advice)


def _devices(environ: Mapping[str, str], known: Fabric) -> Iterator[Finding]:
    """Yield a finding on named devices that do not exist, or on InfiniBand that is not named."""
    devices = environ.get(DEVICES, "")
    listed = {*devices.split(",")} - {""}
    if not listed or "all" in listed or set(devices) & set("^*?~"):  # UCX takes patterns, too
        return
    ports = {port.name for port in known.infiniband}
    ports |= {name.partition(":")[0] for name in ports}
    there = ports | {one.name for one in known.interfaces}
    if wrong := listed - there - {"lo"}:
        value = f"{devices}: this node has no {', '.join(sorted(wrong))}"
        advice = f"Unset it, or choose of {', '.join(sorted(there)) or 'none'}, which are there"
        yield of_settings.error(DEVICES, value, advice)
    elif not listed & ports and _usable(known):
        named = ", ".join(sorted(port.name for port in known.infiniband))
        lost = f"with {devices}, InfiniBand is not used"
        yield of_settings.slow(DEVICES, lost, f"Unset it, or name a port of {named}")


def _switches(environ: Mapping[str, str], config: Mapping[str, Any]) -> Iterator[Finding]:
    slow = of_settings.slow
    if environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        advice = "It is for debugging: unset it"
        yield slow("CUDA_LAUNCH_BLOCKING", "each kernel is waited for", advice)
    level = environ.get("UCX_LOG_LEVEL", "")
    if level.lower().startswith(("debug", "trace", "data", "req")):
        yield slow("UCX_LOG_LEVEL", f"with {level}, each message is logged", "Unset it")
    for name, value in config.items():
        if name.startswith("distributed-ucxx.") and value is False:
            lost = "false in Dask's configuration, so UCX does not use it"
            yield slow(name, lost, "Remove it (hpcdask's own option is --disable-nvlink)")
        if name == "distributed.comm.compression" and value not in (None, False, "auto"):
            advice = "Remove it from Dask's configuration, or set it to false"
            yield slow(name, f"with {value}, each message is compressed", advice)


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
    topic, value = "port range", f"{known.range}: {known.free} of {known.size} ports are free"
    needed = node.workers * ports.PER_WORKER + ports.PER_SCHEDULER
    if known.free < needed:
        advice = f"{plural(node.workers, 'worker')} and the scheduler need {needed}. {ports.NEEDS}"
        yield say.error(topic, value, f"{advice}: give a wider range")
        return
    left = known.free - ports.PER_SCHEDULER
    count, with_ucx = left // ports.PER_WORKER, left // ports.PER_UCX_WORKER
    enough = f"the scheduler and {plural(count, 'worker')}, with ucx {with_ucx}"
    yield say.ok(topic, value, f"Enough on this node for {enough}")
