"""What joins the nodes and the GPUs, whether UCX can use it, and settings that prevent that."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from hpcdask.comm import fabric, ucx_config
from hpcdask.comm.topology import USE_SYSTEM
from hpcdask.comm.ucx_config import excluded_by, permits
from hpcdask.comm.ucx_install import PREFER_SYSTEM
from hpcdask.spec.specs import WorkerSpec

from .findings import Facts, Finding, Reporter

GROUP = "network"
SETTINGS = "settings"
UNREACHABLE = "workers open no connection by UCX (no tcp on an interface, no InfiniBand)"


def read() -> Facts:
    """Interfaces, InfiniBand, NVLink, and the UCX that would be loaded."""
    return dataclasses.asdict(fabric.look())


def check(facts: Facts) -> list[Finding]:
    """What one node's links say."""
    say, known = Reporter(GROUP), fabric.Fabric.from_json(facts["fabric"])
    gpus = bool(facts.get("gpus", {}).get("gpus"))
    return [
        _interfaces(say, known),
        *_ports(say, known),
        *_ucx(say, known, gpus),
    ]


def _interfaces(say: Reporter, known: fabric.Fabric) -> Finding:
    if not known.interfaces:
        return say.warning(
            "interfaces",
            "none that leads to other nodes",
            "A cluster can only be on this node: see ip addr",
        )
    return say.ok("interfaces", ", ".join(map(_interface, known.interfaces)))


def _interface(one: fabric.Interface) -> str:
    kind = "" if one.kind == "other" else f" {one.kind}"
    return f"{one.name} {one.address}{kind}{_speed(one.speed)}"


def _speed(megabits: int) -> str:
    return f" {megabits / 1000:g} Gb/s" if megabits else ""


def _ports(say: Reporter, known: fabric.Fabric) -> Iterator[Finding]:
    topic = "InfiniBand"
    if not known.infiniband:
        return
    usable = [port for port in known.infiniband if port.usable]
    texts = [
        f"{port.name}{_speed(port.speed)}" + (" (RoCE)" if port.link_layer == "Ethernet" else "")
        for port in usable
    ]
    idle = [f"{port.name} {port.state}" for port in known.infiniband if port.state != "ACTIVE"]
    shut = [p.name for p in known.infiniband if p.state == "ACTIVE" and not p.accessible]
    if shut:
        yield say.warning(
            topic,
            f"{', '.join(shut)} cannot be opened",
            "This process may not use the devices in /dev/infiniband: start the container with "
            "them, or request them from the queueing system",
        )
    elif not usable:
        yield say.warning(
            topic, ", ".join(idle), "No port is active: tell the site's staff if it should be"
        )
    if usable:
        yield say.ok(topic, ", ".join(texts), f"Not active: {', '.join(idle)}" if idle else "")


def _ucx(say: Reporter, known: fabric.Fabric, gpus: bool) -> Iterator[Finding]:
    ucx = known.ucx
    if ucx.problem:
        if gpus and (known.nvlink or any(port.usable for port in known.infiniband)):
            yield say.warning(
                "UCX", "cannot be used, so NVLink and InfiniBand are not", ucx.problem
            )
        else:
            yield say.ok("UCX", "not used", ucx.problem if gpus else "")
        return
    built_in = ", ".join(("tcp", "shared memory", *ucx.transports))
    where = "the system's" if ucx.source == "system" else "its package's"
    yield say.ok("UCX", f"{ucx.ucx} ({where}) with {built_in}")
    if gpus and "cuda" not in ucx.transports:
        how = "its NVLink is not used" if known.nvlink else "GPU memory cannot be sent"
        yield say.slow(
            "UCX and NVLink",
            f"this UCX has no CUDA transport, so {how}",
            f"Use that of the package: unset {PREFER_SYSTEM}, and see UCX_MODULE_DIR",
        )
    if any(port.usable for port in known.infiniband) and "ib" not in ucx.transports:
        yield say.slow(
            "UCX and InfiniBand",
            "this UCX has no InfiniBand transport, and goes over tcp between nodes",
            f"UCX from PyPI has none: {USE_SYSTEM}",
        )


def check_settings(process: Facts, facts: Facts) -> list[Finding]:
    """Which of the user's settings, in one rank, slow things down."""
    say = Reporter(SETTINGS)
    environ: dict[str, str] = process["env"]
    known = (
        fabric.Fabric.from_json(facts["fabric"]) if "nvlink" in facts.get("fabric", {}) else None
    )
    gpus = len(facts.get("gpus", {}).get("gpus", ()))
    shut = _shut(environ, known) if known and gpus else set()
    found = [
        *_tls(say, environ, known, gpus, shut),
        *_devices(say, environ, known, shut),
        *_managers(say, environ, shut),
        *_system_ucx(say, environ, known),
        *_switches(say, environ, process["config"]),
    ]
    reported = {finding.topic for finding in found}
    rest = [
        f"{name}={value}"
        for name, value in sorted(environ.items())
        if name.startswith(("UCX_", "DASK_", "CUDA_VISIBLE")) and name not in reported
    ]
    if rest:
        found.append(say.ok("variables", " ".join(rest)))
    return found


def _shut(environ: Mapping[str, str], known: fabric.Fabric) -> set[str]:
    """Which variables leave UCX no interface to open connections over."""
    if known.ucx.problem:
        return set()
    given = {name: value for name in ucx_config.VARIABLES if (value := environ.get(name))}
    return {
        entry.partition("=")[0] for entry in ucx_config.blocking_settings(known, given, far=False)
    }


def _tls(
    say: Reporter,
    environ: Mapping[str, str],
    known: fabric.Fabric | None,
    gpus: int,
    shut: set[str],
) -> Iterator[Finding]:
    tls = environ.get("UCX_TLS", "")
    advice = "Unset UCX_TLS and let UCX choose, or add what is missing"
    if known is None or not tls:
        return
    lost = []
    if gpus and excluded_by(WorkerSpec(), tls, "nvlink"):
        what = "NVLink is not used" if known.nvlink else "GPUs of a node do not reach one another"
        lost.append(f"{what} (no cuda_ipc)")
    if any(port.usable for port in known.infiniband) and excluded_by(
        WorkerSpec(), tls, "infiniband"
    ):
        lost.append("InfiniBand is not used (no rc)")
    if gpus and not permits(tls, "copies"):
        lost.append("GPU memory is not sent by UCX (no cuda_copy)")
    if "UCX_TLS" in shut:
        lost.append(UNREACHABLE)
    if lost:
        yield say.slow("UCX_TLS", f"with {tls}, {', '.join(lost)}", advice)


def _devices(
    say: Reporter, environ: Mapping[str, str], known: fabric.Fabric | None, shut: set[str]
) -> Iterator[Finding]:
    value = environ.get("UCX_NET_DEVICES", "all")
    if known is None or value == "all" or value.startswith("^"):
        return
    chosen = set(value.split(","))
    ports = {port.name for port in known.infiniband}
    there = ports | {one.name for one in known.interfaces} | {"lo", "all"}
    there |= {name.partition(":")[0] for name in ports}
    # UCX takes beginnings and patterns, too, so only plain names are checked
    missing = sorted(name for name in chosen - there if not set(name) & set("*?~"))
    have = ", ".join(sorted(there - {"lo", "all"})) or "none"
    if missing:
        yield say.error(
            "UCX_NET_DEVICES",
            f"{value}: this node has no {', '.join(missing)}",
            f"UCX would find no network here. This node has {have}: choose of these, or unset it",
        )
    elif "UCX_NET_DEVICES" in shut:
        names = ", ".join(one.name for one in known.interfaces) or "lo"
        yield say.slow(
            "UCX_NET_DEVICES", f"with {value}, {UNREACHABLE}", f"Unset it, or add one of {names}"
        )
    elif any(port.usable for port in known.infiniband) and not chosen & (
        ports | {name.partition(":")[0] for name in ports}
    ):
        yield say.slow(
            "UCX_NET_DEVICES",
            f"with {value}, InfiniBand is not used",
            f"Unset it, or name a port of {', '.join(sorted(ports))}",
        )


def _managers(say: Reporter, environ: Mapping[str, str], shut: set[str]) -> Iterator[Finding]:
    name = ucx_config.VARIABLES[2]
    if shut == {name}:
        yield say.slow(name, f"with {environ[name]}, {UNREACHABLE}", "Unset it")


def _system_ucx(
    say: Reporter, environ: Mapping[str, str], known: fabric.Fabric | None
) -> Iterator[Finding]:
    value = environ.get(PREFER_SYSTEM, "false")
    if known and value.lower() != "false" and known.ucx.source == "package" and known.ucx.ucx:
        yield say.warning(
            PREFER_SYSTEM,
            f"{value}, but the system's UCX is not found",
            "The package's is used instead: load the site's UCX (module load ucx), with its "
            "libucp.so on LD_LIBRARY_PATH, or unset the variable",
        )


def _switches(
    say: Reporter, environ: Mapping[str, str], config: Mapping[str, Any]
) -> Iterator[Finding]:
    if environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        yield say.slow(
            "CUDA_LAUNCH_BLOCKING",
            "each kernel is waited for",
            "It is for debugging: unset it",
        )
    if environ.get("UCX_LOG_LEVEL", "").lower().startswith(("debug", "trace", "data", "req")):
        yield say.slow(
            "UCX_LOG_LEVEL", f"with {environ['UCX_LOG_LEVEL']}, each message is logged", "Unset it"
        )
    for name, value in config.items():
        if name.startswith("distributed-ucxx.") and value is False:
            yield say.slow(
                name,
                "false in Dask's configuration, so UCX does not use it",
                "Remove it (hpcdask's own option is --disable-nvlink and the like)",
            )
        if name == "distributed.comm.compression" and value not in (None, False, "auto"):
            yield say.slow(
                name,
                f"with {value}, each message is compressed",
                "Remove it from Dask's configuration, or set it to false",
            )
