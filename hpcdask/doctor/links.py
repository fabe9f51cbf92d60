"""What joins the nodes and the GPUs, whether UCX can use it, and settings that prevent that."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from hpcdask.comm import fabric
from hpcdask.comm.fabric import Fabric
from hpcdask.comm.obstacles import USE_SYSTEM, Obstacle, obstacles
from hpcdask.comm.topology import NodeLinks, Topology
from hpcdask.comm.ucx_config import VARIABLES
from hpcdask.comm.ucx_install import PREFER_SYSTEM
from hpcdask.spec.specs import WorkerSpec

from .findings import Facts, Finding, Reporter, known_gpus

say, of_settings = Reporter("network"), Reporter("settings")
TLS, DEVICES, MANAGERS = VARIABLES
#: What to do about a UCX that lacks a transport, by the kind of the obstacle.
LACKS = {
    "cuda": (
        "UCX and NVLink",
        f"Use that of the package: unset {PREFER_SYSTEM}, and see UCX_MODULE_DIR",
    ),
    "ib": ("UCX and InfiniBand", f"UCX from PyPI has none: {USE_SYSTEM}"),
}


def read(*, gpus: bool = True) -> Facts:
    """Interfaces, InfiniBand, NVLink, and the UCX that would be loaded."""
    return dataclasses.asdict(fabric.look(gpus=gpus))


def obstacles_of(facts: Facts, fabrics: Iterable[Fabric]) -> list[Obstacle]:
    """What keeps ucx or a link from workers on a node's GPUs, by the links that its ranks see."""
    gpus = known_gpus(facts)
    seats = [NodeLinks("this node", gpus, known) for known in fabrics]
    return obstacles(Topology(WorkerSpec(), seats))


def check(facts: Facts) -> Iterator[Finding]:
    """What one node's links say."""
    known = Fabric.from_json(facts["fabric"])
    if known.interfaces:
        yield say.ok("interfaces", ", ".join(map(_interface, known.interfaces)))
    else:
        advice = "A cluster can only be on this node: see ip addr"
        yield say.warning("interfaces", "none that leads to other nodes", advice)
    yield from _ports(known)
    yield from _ucx(facts, known)


def _interface(one: fabric.Interface) -> str:
    kind = "" if one.kind == "other" else f" {one.kind}"
    return f"{one.name} {one.address}{kind}{_speed(one.speed)}"


def _speed(megabits: int) -> str:
    return f" {megabits / 1000:g} Gb/s" if megabits else ""


def _ports(known: Fabric) -> Iterator[Finding]:
    topic = "InfiniBand"
    usable = [
        f"{p.name}{_speed(p.speed)}{' (RoCE)' * p.roce}" for p in known.infiniband if p.usable
    ]
    idle = ", ".join(f"{p.name} {p.state}" for p in known.infiniband if p.state != "ACTIVE")
    if shut := [port.name for port in known.infiniband if port.closed]:
        yield say.warning(
            topic,
            f"{', '.join(shut)} cannot be opened",
            "This process may not use the devices in /dev/infiniband: start the container with "
            "them, or request them from the queueing system",
        )
    elif idle and not usable:
        advice = "No port is active: tell the site's staff if it should be"
        yield say.warning(topic, idle, advice)
    if usable:
        yield say.ok(topic, ", ".join(usable), f"Not active: {idle}" if idle else "")


def _ucx(facts: Facts, known: Fabric) -> Iterator[Finding]:
    ucx, gpus = known.ucx, known_gpus(facts)
    if ucx.problem:
        if gpus and (known.nvlink or any(port.usable for port in known.infiniband)):
            lost = "cannot be used, so NVLink and InfiniBand are not"
            yield say.warning("UCX", lost, ucx.problem)
        else:
            yield say.ok("UCX", "not used", ucx.problem if gpus else "")
        return
    built_in = ", ".join(("tcp", "shared memory", *ucx.transports))
    where = "the system's" if ucx.source == "system" else "its package's"
    yield say.ok("UCX", f"{ucx.ucx} ({where}) with {built_in}")
    for one in obstacles_of(facts, [known]):
        if one.kind in LACKS:
            topic, advice = LACKS[one.kind]
            yield say.slow(topic, one.effect, advice)


def check_settings(process: Facts, facts: Facts) -> list[Finding]:
    """Which of the user's settings, in one rank, slow things down."""
    environ: dict[str, str] = process["env"]
    found: list[Finding] = []
    if "nvlink" in facts.get("fabric", {}):
        found = [*_of_ucx(environ, facts), *_system_ucx(environ, facts["fabric"]["ucx"])]
    found += _switches(environ, process["config"])
    reported = {finding.topic for finding in found}
    rest = [
        f"{name}={value}"
        for name, value in sorted(environ.items())
        if name.startswith(("UCX_", "DASK_", "CUDA_VISIBLE")) and name not in reported
    ]
    if rest:
        found.append(of_settings.ok("variables", " ".join(rest)))
    return found


def _of_ucx(environ: Mapping[str, str], facts: Facts) -> Iterator[Finding]:
    """What is lost by UCX's variables in one rank."""
    known = Fabric.from_json(facts["fabric"])
    own = {name: environ.get(name, "") for name in VARIABLES}
    ucx = dataclasses.replace(known.ucx, tls=own[TLS], devices=own[DEVICES], managers=own[MANAGERS])
    found = obstacles_of(facts, [dataclasses.replace(known, ucx=ucx)])
    yield from (missing := [*_missing(own[DEVICES], known)])
    shut = any(one.kind == "interface" and DEVICES in one.settings for one in found)
    ports = f"name a port of {', '.join(sorted(port.name for port in known.infiniband))}"
    names = f"add one of {', '.join(one.name for one in known.interfaces) or 'lo'}"
    for name, advice in (
        (TLS, "Unset UCX_TLS and let UCX choose, or add what is missing"),
        (DEVICES, f"Unset it, or {names if shut else ports}"),
        (MANAGERS, "Unset it"),
    ):
        told = [one for one in found if name in one.settings and one.effect]
        told.sort(key=lambda one: one.kind == "interface")
        if name == DEVICES:
            told = [] if missing else told[-1:]
        elif name == MANAGERS:  # of several that do it together, the others are told
            told = [one for one in told if one.settings == (name,)]
        if lost := ", ".join(one.effect for one in told):
            yield of_settings.slow(name, f"with {own[name]}, {lost}", advice)


def _missing(devices: str, known: Fabric) -> Iterator[Finding]:
    """Devices that are named and not there."""
    ports = {port.name for port in known.infiniband}
    there = ports | {one.name for one in known.interfaces}
    there |= {name.partition(":")[0] for name in ports}
    listed = {*devices.split(",")} if not devices.startswith("^") else set()
    # UCX takes beginnings and patterns, too, so only plain names are checked
    wrong = [name for name in listed - there - {"", "lo", "all"} if not set(name) & set("*?~")]
    if wrong:
        have = ", ".join(sorted(there)) or "none"
        yield of_settings.error(
            DEVICES,
            f"{devices}: this node has no {', '.join(sorted(wrong))}",
            f"UCX would find no network here. This node has {have}: choose of these, or unset it",
        )


def _system_ucx(environ: Mapping[str, str], ucx: Facts) -> Iterator[Finding]:
    value = environ.get(PREFER_SYSTEM, "false")
    if value.lower() != "false" and ucx["source"] == "package" and ucx["ucx"]:
        yield of_settings.warning(
            PREFER_SYSTEM,
            f"{value}, but the system's UCX is not found",
            "The package's is used instead: load the site's UCX (module load ucx), with its "
            "libucp.so on LD_LIBRARY_PATH, or unset the variable",
        )


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
            yield slow(
                name,
                "false in Dask's configuration, so UCX does not use it",
                "Remove it (hpcdask's own option is --disable-nvlink and the like)",
            )
        if name == "distributed.comm.compression" and value not in (None, False, "auto"):
            advice = "Remove it from Dask's configuration, or set it to false"
            yield slow(name, f"with {value}, each message is compressed", advice)
