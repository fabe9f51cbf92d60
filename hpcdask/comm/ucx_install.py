"""The UCX that a worker here would load, found without loading it."""

from __future__ import annotations

import glob
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal

from hpcdask.gpu.driver import cuda_extra, read
from hpcdask.spec.records import Record

#: With any value but "false", libucx's Python package takes the system's UCX.
PREFER_SYSTEM = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"
#: A transport module of UCX: libuct_ib_mlx5.so.0.
MODULE = re.compile(r"/libuct_(\w+)\.so(?:\.[\d.]*)?$")
#: Seconds that ``ucx_info`` may take.
UCX_INFO_DEADLINE_S = 10.0


@dataclass(frozen=True)
class UcxInstall(Record):
    """The UCX that a worker would load, from a ``package`` (of PyPI) or the ``system``.

    Versions are empty where there is none, or none is known. ``transports`` are the modules beside
    the library, such as ``cuda``, ``cma``, ``ib``, without those that are built in (tcp, shared
    memory). ``problem`` is a sentence if distributed cannot use UCX, with the remedy. ``tls`` is
    the user's ``UCX_TLS``.
    """

    distributed_ucxx: str = ""
    ucx: str = ""
    source: Literal["package", "system"] = "package"
    transports: tuple[str, ...] = ()
    problem: str = ""
    tls: str = ""

    @property
    def missing(self) -> bool:
        """Return whether the packages are not installed, rather than broken."""
        return bool(self.problem) and not self.distributed_ucxx


def installed_ucx(environ: Mapping[str, str] | None = None) -> UcxInstall:
    """Find the UCX of libucx's package, or ask ``ucx_info`` for that of the system."""
    environ = os.environ if environ is None else environ
    tls = environ.get("UCX_TLS", "")
    install = f'pip install "hpcdask[{cuda_extra()}]"'
    missing = [name for name in ("distributed_ucxx", "ucxx") if find_spec(name) is None]
    if missing:
        names = " and ".join(name.replace("_", "-") for name in missing)
        verb = "is" if len(missing) == 1 else "are"
        return UcxInstall(problem=f"{names} {verb} not installed: {install}", tls=tls)
    package = find_spec("libucx")
    wanted = environ.get(PREFER_SYSTEM, "false").lower() != "false"
    ours = _version("distributed-ucxx")
    if package and package.origin and not wanted:
        folder = os.path.join(os.path.dirname(package.origin), "lib")
        return UcxInstall(ours, _version("libucx"), "package", _modules(folder), tls=tls)
    found, folder = _ask_ucx_info(environ)
    problem = ""
    if not found:
        remedy = f"unset {PREFER_SYSTEM}" if wanted else install
        problem = f"ucx_info of the system's UCX is not on PATH: load its module, or {remedy}"
    return UcxInstall(ours, found, "system", _modules(folder), problem, tls)


def _ask_ucx_info(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return version and folder of the system's UCX; empty where it does not answer."""
    path = f"{environ.get('PATH', os.defpath)}:{sys.prefix}/bin"  # conda's, not activated
    program = shutil.which("ucx_info", path=path)
    if program is None:
        return "", ""
    try:
        done = subprocess.run(
            [program, "-v"],
            env=dict(environ),
            capture_output=True,
            text=True,
            timeout=UCX_INFO_DEADLINE_S,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return "", ""
    found = re.search(r"Library version: (\S+)", done.stdout)
    library = re.search(r"Library path: (\S+)", done.stdout)
    folder = os.path.dirname(library[1]) if library else os.path.join(program, "..", "..", "lib")
    return found[1] if found else "", folder


def _version(project: str) -> str:
    """Return the version of a package of RAPIDS, whose name on PyPI ends with CUDA's version."""
    for name in (f"{project}-cu13", f"{project}-cu12", project):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def _modules(folder: str) -> tuple[str, ...]:
    """Return UCX's transport modules beside its library, by their files' names."""
    files = glob.glob(f"{glob.escape(folder)}/ucx/*") if folder else []
    return tuple(sorted({match[1] for file in files if (match := MODULE.search(file))}))


def loaded_transports(maps: str = "/proc/self/maps") -> tuple[str, ...]:
    """Return the transport modules that this process has loaded, by its memory map."""
    lines = read(maps).splitlines()
    return tuple(sorted({match[1] for line in lines if (match := MODULE.search(line))}))
