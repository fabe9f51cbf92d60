"""What joins the GPUs and the nodes, and which of it the UCX that is installed can use.

Everything is read from files, psutil and NVML: no CUDA call, and UCX is not loaded, so that the
process can still fork. Nothing here decides; `hpcdask.transport` does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal, NamedTuple

from .devices import CUDA_EXTRA
from .sharing import hidden_gpus

Kind = Literal["infiniband", "slingshot", "ethernet", "other"]

#: Types of network interfaces in sysfs, from Linux's if_arp.h.
ETHERNET, INFINIBAND = 1, 32
#: Bridges of container and virtual machine software, and their ends.
VIRTUAL = re.compile(r"(docker|podman|virbr|veth|lxc|lxd|cni|cali|flannel|br-[0-9a-f]{12}$)")
#: With any value but this, libucx's Python package takes the system's UCX where there is one.
PREFER_SYSTEM = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"
#: A transport module of UCX: libuct_ib_mlx5.so.0.
MODULE = re.compile(r"/libuct_(\w+)\.so(?:\.[\d.]*)?$")
#: Seconds that the list of the loader's libraries may take.
LDCONFIG_DEADLINE_S = 5.0


@dataclass(frozen=True)
class Interface:
    """A network interface with an IPv4 address.

    Attributes
    ----------
    name, address
        Such as ``ib0`` and ``10.1.0.7``.
    kind
        ``infiniband`` (IP over it), ``slingshot``, ``ethernet`` or ``other``.
    speed
        Mb/s; 0 where the driver does not tell.
    """

    name: str
    address: str
    kind: Kind
    speed: int

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Interface:
        """Read what ``dataclasses.asdict`` and JSON made of it."""
        return cls(**data)


@dataclass(frozen=True)
class Port:
    """A port of an RDMA device.

    Attributes
    ----------
    name
        Device and port as UCX names them: ``mlx5_0:1``.
    link_layer
        ``InfiniBand``, or ``Ethernet`` for RoCE.
    state
        The port's state in words: ``ACTIVE``, ``DOWN``, ``INIT``, ...
    speed
        Mb/s; 0 where the driver does not tell.
    accessible
        Whether this process may open the device. A container often shows it in sysfs only.
    """

    name: str
    link_layer: str
    state: str
    speed: int
    accessible: bool

    @property
    def usable(self) -> bool:
        """Whether UCX can send through it, if it has the transport."""
        return self.state == "ACTIVE" and self.accessible

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Port:
        """Read what ``dataclasses.asdict`` and JSON made of it."""
        return cls(**data)


@dataclass(frozen=True)
class Ucx:
    """The UCX that a worker would load.

    Attributes
    ----------
    distributed_ucxx, ucx
        Versions; empty where there is none, or none is known.
    source
        ``package`` (from PyPI) or ``system``.
    transports
        The transport modules beside it, such as ``cuda``, ``cma``, ``ib``, ``rdmacm``. Those that
        are built in (tcp, shared memory) are not listed.
    problem
        One sentence if distributed cannot use it, and what to do; else empty.
    tls
        The user's ``UCX_TLS``; empty for none.
    """

    distributed_ucxx: str = ""
    ucx: str = ""
    source: Literal["package", "system"] = "package"
    transports: tuple[str, ...] = ()
    problem: str = ""
    tls: str = ""

    @property
    def missing(self) -> bool:
        """Whether the packages are not there, rather than broken."""
        return bool(self.problem) and not self.distributed_ucxx

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Ucx:
        """Read what ``dataclasses.asdict`` and JSON made of it."""
        return cls(**{**data, "transports": tuple(data["transports"])})


@dataclass(frozen=True)
class Fabric:
    """What one process sees of its node's links.

    Attributes
    ----------
    interfaces
        Network interfaces that are up and lead to other nodes.
    infiniband
        Ports of RDMA devices, those that are down too.
    nvlink
        Pairs of UUIDs of GPUs that NVLink joins, also through switches.
    hidden_gpus
        GPUs of the node that a cgroup or a container keeps from this process.
    ucx
        The UCX that a worker here would load.
    gpus
        UUIDs of the GPUs that NVML shows, whatever ``CUDA_VISIBLE_DEVICES`` says, without sliced
        ones (MIG).
    nvlink_unknown
        Pairs of which NVML does not tell.
    """

    interfaces: tuple[Interface, ...] = ()
    infiniband: tuple[Port, ...] = ()
    nvlink: tuple[tuple[str, str], ...] = ()
    hidden_gpus: int = 0
    ucx: Ucx = dataclasses.field(default_factory=Ucx)
    gpus: tuple[str, ...] = ()
    nvlink_unknown: tuple[tuple[str, str], ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fabric:
        """Read what ``dataclasses.asdict`` and JSON made of a fabric."""
        return cls(
            interfaces=tuple(map(Interface.from_json, data["interfaces"])),
            infiniband=tuple(map(Port.from_json, data["infiniband"])),
            nvlink=tuple((a, b) for a, b in data["nvlink"]),
            hidden_gpus=data["hidden_gpus"],
            ucx=Ucx.from_json(data["ucx"]),
            gpus=tuple(data["gpus"]),
            nvlink_unknown=tuple((a, b) for a, b in data["nvlink_unknown"]),
        )


def look(root: str = "/", environ: Mapping[str, str] | None = None, *, gpus: bool = True) -> Fabric:
    """Look at everything. Missing hardware and packages are an answer, not an error.

    Parameters
    ----------
    root
        Folder that stands for ``/``, with a slash at its end.
    environ
        Environment of the worker; default: this process's.
    gpus
        Whether to ask NVML and look for GPUs that are hidden.
    """
    pairs = nvlink_pairs() if gpus else Pairs((), (), ())
    return Fabric(
        interfaces=interfaces(root),
        infiniband=infiniband(root),
        nvlink=pairs.joined,
        hidden_gpus=hidden_gpus(root) if gpus else 0,
        ucx=installed_ucx(root, environ),
        gpus=pairs.gpus,
        nvlink_unknown=pairs.unknown,
    )


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def interfaces(root: str = "/", *, every: bool = False) -> tuple[Interface, ...]:
    """The network interfaces with an IPv4 address, by name.

    Parameters
    ----------
    root
        Folder that stands for ``/``, with a slash at its end.
    every
        Also those that lead to no other node: loopback, bridges of containers, links that are down.
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
    number = _read(f"{root}sys/class/net/{name}/type")
    if number == str(INFINIBAND):
        return "infiniband"
    if name.startswith("hsn"):
        return "slingshot"
    return "ethernet" if number == str(ETHERNET) else "other"


def infiniband(root: str = "/") -> tuple[Port, ...]:
    """The ports of the node's RDMA devices, in the kernel's order of names."""
    verbs = {
        _read(f"{folder}/ibdev"): f"{root}dev/infiniband/{os.path.basename(folder)}"
        for folder in glob.glob(f"{glob.escape(root)}sys/class/infiniband_verbs/uverbs*")
    }
    found = []
    for folder in sorted(glob.glob(f"{glob.escape(root)}sys/class/infiniband/*/ports/*")):
        device = folder.split(os.sep)[-3]
        rate = re.match(r"[\d.]+", _read(f"{folder}/rate"))  # "400 Gb/sec (4X NDR)"
        found.append(
            Port(
                f"{device}:{os.path.basename(folder)}",
                _read(f"{folder}/link_layer"),
                _read(f"{folder}/state").partition(":")[2].strip(),  # "4: ACTIVE"
                round(float(rate[0]) * 1000) if rate else 0,
                os.access(verbs.get(device, ""), os.R_OK | os.W_OK),
            )
        )
    return tuple(found)


class Pairs(NamedTuple):
    """GPUs that are not sliced, and which pairs of them NVLink joins, or may join."""

    gpus: tuple[str, ...]
    joined: tuple[tuple[str, str], ...]
    unknown: tuple[tuple[str, str], ...]


def nvlink_pairs() -> Pairs:
    """Ask NVML which of the GPUs that it shows reach each other's memory over NVLink.

    A pair is unknown where the driver or NVML's package does not answer.
    """
    nothing = Pairs((), (), ())
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, or one that does not fit the other: no NVLink
        return nothing
    try:
        handles = dict(_whole_gpus(pynvml))
        uuids = tuple(handles)
        joined, unknown = [], []
        for index, first in enumerate(uuids):
            for second in uuids[index + 1 :]:
                answer = _nvlink(pynvml, handles[first], handles[second])
                if answer is None:
                    unknown.append((first, second))
                elif answer:
                    joined.append((first, second))
        return Pairs(uuids, tuple(joined), tuple(unknown))
    except pynvml.NVMLError:
        return nothing
    finally:
        pynvml.nvmlShutdown()


def _whole_gpus(pynvml: Any) -> Iterator[tuple[str, Any]]:
    for index in range(pynvml.nvmlDeviceGetCount()):
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            uuid = pynvml.nvmlDeviceGetUUID(handle)
        except pynvml.NVMLError:  # a cgroup keeps it from this process, or it is broken
            continue
        with contextlib.suppress(pynvml.NVMLError):
            if pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE:
                continue
        yield (uuid.decode() if isinstance(uuid, bytes) else uuid), handle


def _nvlink(pynvml: Any, first: Any, second: Any) -> bool | None:
    try:
        status = pynvml.nvmlDeviceGetP2PStatus(first, second, pynvml.NVML_P2P_CAPS_INDEX_NVLINK)
    except (pynvml.NVMLError, AttributeError):
        return None
    return None if status == pynvml.NVML_P2P_STATUS_UNKNOWN else status == pynvml.NVML_P2P_STATUS_OK


def installed_ucx(root: str = "/", environ: Mapping[str, str] | None = None) -> Ucx:
    """Find the UCX that distributed-ucxx would load, without loading it.

    The rules are those of libucx's ``load_library`` and of UCX's module loader.
    """
    environ = os.environ if environ is None else environ
    tls = environ.get("UCX_TLS", "")
    missing = [name for name in ("distributed_ucxx", "ucxx") if find_spec(name) is None]
    if missing:
        what = " and ".join(name.replace("_", "-") for name in missing)
        verb = "is" if len(missing) == 1 else "are"
        return Ucx(problem=f"{what} {verb} not installed: {_install()}", tls=tls)
    package = find_spec("libucx")
    wheel = (
        os.path.join(os.path.dirname(package.origin), "lib") if package and package.origin else ""
    )
    wheel = wheel if os.path.exists(os.path.join(wheel, "libucp.so")) else ""
    system = ""
    if not wheel or environ.get(PREFER_SYSTEM, "false").lower() != "false":
        # libucx asks for the name without a number, which only development packages bring; what has
        # no libucx package (conda) finds the numbered one through its own link
        system = _find_library("libucp.so" if wheel else "libucp.so.0", root, environ)
    folder = os.path.dirname(system) if system else wheel
    version = _ucx_version(folder)
    return Ucx(
        distributed_ucxx=_version("distributed-ucxx"),
        ucx=version,
        source="system" if system else "package",
        transports=_modules(folder, environ),
        problem=_ucx_problem(folder, version),
        tls=tls,
    )


def _install() -> str:
    return f'pip install "hpcdask[{CUDA_EXTRA}]"'


def _ucx_problem(folder: str, version: str) -> str:
    if not folder:
        return f"ucxx finds no libucp, neither its package's nor the system's: {_install()}"
    package = find_spec("ucxx")
    text = _read(package.origin) if package and package.origin else ""
    least = re.search(r'__ucx_min_version__ = "([\d.]+)"', text)
    if least and version and _numbers(version) < _numbers(least[1]):
        return (
            f"the UCX in {folder} is {version}, and ucxx needs {least[1]} or newer: load a newer "
            f"one, or unset {PREFER_SYSTEM}"
        )
    return ""


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)[:3]))


def _version(project: str) -> str:
    """Version of a package of RAPIDS, whose name on PyPI ends with CUDA's version."""
    from importlib.metadata import PackageNotFoundError, version

    for name in (f"{project}-cu13", f"{project}-cu12", project):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return ""


def _ucx_version(folder: str) -> str:
    text = _read(os.path.join(folder, "pkgconfig", "ucx.pc"))
    found = re.search(r"^Version:\s*(\S+)", text, re.MULTILINE)
    return found[1] if found else ""


def _find_library(name: str, root: str, environ: Mapping[str, str]) -> str:
    """Where the dynamic loader finds a library; empty where it does not."""
    listed = environ.get("LD_LIBRARY_PATH", "").split(":")
    for folder in [*(part for part in listed if part), os.path.join(sys.prefix, "lib")]:
        path = root + os.path.join(folder, name).lstrip("/")
        if os.path.exists(path):
            return path
    try:
        done = subprocess.run(
            ["/sbin/ldconfig", "-p", "-C", f"{root}etc/ld.so.cache"],
            capture_output=True,
            text=True,
            timeout=LDCONFIG_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    found = re.search(rf"^\s*{re.escape(name)} .*=> (\S+)$", done.stdout, re.MULTILINE)
    return root + found[1].lstrip("/") if found else ""


def _modules(folder: str, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The transport modules that UCX would load, by their files' names."""
    folders = [os.path.join(folder, "ucx"), environ.get("UCX_MODULE_DIR", "")]
    files = [file for one in folders if one for file in glob.glob(f"{glob.escape(one)}/*")]
    names = {match[1] for file in files if (match := MODULE.search(file))}
    if allowed := environ.get("UCX_MODULES", ""):
        listed = set(allowed.lstrip("^").split(","))
        if "all" not in listed:
            names = names - listed if allowed.startswith("^") else names & listed
    return tuple(sorted(names))


def loaded_transports(maps: str = "/proc/self/maps") -> tuple[str, ...]:
    """The transport modules that a process which runs UCX has loaded, by its memory map.

    Parameters
    ----------
    maps
        The map's file: ``/proc/PID/maps``.
    """
    lines = _read(maps).splitlines()
    return tuple(sorted({match[1] for line in lines if (match := MODULE.search(line))}))
