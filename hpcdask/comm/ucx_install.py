"""The UCX that a worker here would load, found without loading it."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Literal

from hpcdask.gpu.driver import cuda_extra, read
from hpcdask.spec.records import Record

#: With any value but "false", libucx's Python package takes the system's UCX where there is one.
PREFER_SYSTEM = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"
#: A transport module of UCX: libuct_ib_mlx5.so.0.
MODULE = re.compile(r"/libuct_(\w+)\.so(?:\.[\d.]*)?$")
#: Seconds that the list of the loader's libraries may take.
LDCONFIG_DEADLINE_S = 5.0


@dataclass(frozen=True)
class UcxInstall(Record):
    """The UCX that a worker would load, from a ``package`` (of PyPI) or the ``system``.

    Versions are empty where there is none, or none is known. ``transports`` are the modules beside
    it, such as ``cuda``, ``cma``, ``ib``, ``rdmacm``, without those that are built in (tcp, shared
    memory). ``problem`` is one sentence if distributed cannot use it, and what to do. The last
    three are the user's ``UCX_TLS``, ``UCX_NET_DEVICES`` and ``UCX_SOCKADDR_TLS_PRIORITY``.
    """

    distributed_ucxx: str = ""
    ucx: str = ""
    source: Literal["package", "system"] = "package"
    transports: tuple[str, ...] = ()
    problem: str = ""
    tls: str = ""
    devices: str = ""
    managers: str = ""

    @property
    def missing(self) -> bool:
        """Whether the packages are not there, rather than broken."""
        return bool(self.problem) and not self.distributed_ucxx


def installed_ucx(root: str = "/", environ: Mapping[str, str] | None = None) -> UcxInstall:
    """Find the UCX that distributed-ucxx would load, without loading it.

    The rules are those of libucx's ``load_library`` and of UCX's module loader.
    """
    environ = os.environ if environ is None else environ
    settings: dict[str, Any] = {
        "tls": environ.get("UCX_TLS", ""),
        "devices": environ.get("UCX_NET_DEVICES", ""),
        "managers": environ.get("UCX_SOCKADDR_TLS_PRIORITY", ""),
    }
    missing = [name for name in ("distributed_ucxx", "ucxx") if find_spec(name) is None]
    if missing:
        what = " and ".join(name.replace("_", "-") for name in missing)
        verb = "is" if len(missing) == 1 else "are"
        return UcxInstall(problem=f"{what} {verb} not installed: {_install()}", **settings)
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
    return UcxInstall(
        distributed_ucxx=_version("distributed-ucxx"),
        ucx=version,
        source="system" if system else "package",
        transports=_modules(folder, environ),
        problem=_ucx_problem(folder, version),
        **settings,
    )


def _install() -> str:
    return f'pip install "hpcdask[{cuda_extra()}]"'


def _ucx_problem(folder: str, version: str) -> str:
    if not folder:
        return f"ucxx finds no libucp, neither its package's nor the system's: {_install()}"
    package = find_spec("ucxx")
    text = read(package.origin) if package and package.origin else ""
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
    text = read(os.path.join(folder, "pkgconfig", "ucx.pc"))
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
    """The transport modules that a process which runs UCX has loaded, by its memory map."""
    lines = read(maps).splitlines()
    return tuple(sorted({match[1] for line in lines if (match := MODULE.search(line))}))
