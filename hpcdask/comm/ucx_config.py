"""UCX before it starts: which is installed, its variables, and its hooks into memory."""

from __future__ import annotations

import contextlib
import ctypes
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
from typing import TYPE_CHECKING, Literal

from hpcdask.errors import installing
from hpcdask.gpu.driver import cuda_extra
from hpcdask.spec.records import Record

if TYPE_CHECKING:
    from hpcdask.spec.specs import WorkerSpec  # imports dask

#: With any value but "false", libucx's Python package takes the system's UCX.
PREFER_SYSTEM = "RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY"
#: A transport module of UCX: libuct_ib_mlx5.so.0.
MODULE = re.compile(r"/libuct_(\w+)\.so(?:\.[\d.]*)?$")
#: Names in ``UCX_TLS`` of the links, and of the copies without which UCX sends no GPU memory.
NAMES: dict[str, re.Pattern[str]] = {
    "copies": re.compile(r"cuda|cuda_copy"),
    "nvlink": re.compile(r"cuda|cuda_ipc"),
    "infiniband": re.compile(r"ib|(rc|dc|ud)(_\w+)?"),
}
#: Seconds that ``ucx_info`` may take.
UCX_INFO_DEADLINE_S = 10.0


@dataclass(frozen=True)
class UcxInstall(Record):
    """The UCX that a worker would load, from a ``package`` (of PyPI) or the ``system``.

    Versions are empty if unknown. ``transports`` are the modules beside the library, such as
    ``cuda`` and ``ib``, without built-in ones (tcp, shared memory). ``problem`` is a sentence, with
    the remedy, if distributed cannot use UCX. ``tls`` is the user's ``UCX_TLS``.
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

    def permits(self, part: str) -> bool:
        """Return whether the user's ``UCX_TLS`` leaves UCX a part of `NAMES`."""
        if not self.tls:
            return True
        names = [name.lstrip("\\") for name in self.tls.lstrip("^").split(",")]
        named = any(map(NAMES[part].fullmatch, names))
        return not named if self.tls.startswith("^") else named or "all" in names


def installed_ucx(environ: Mapping[str, str] | None = None) -> UcxInstall:
    """Find the UCX of libucx's package, or ask ``ucx_info`` for that of the system."""
    environ = os.environ if environ is None else environ
    tls = environ.get("UCX_TLS", "")
    install = installing(cuda_extra())
    for name in ("distributed_ucxx", "ucxx"):
        if find_spec(name) is None:
            problem = f"{name.replace('_', '-')} is not installed: {install}"
            return UcxInstall(problem=problem, tls=tls)
    package, ours = find_spec("libucx"), _version("distributed-ucxx")
    wanted = environ.get(PREFER_SYSTEM, "false").lower() != "false"
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
    command = [shutil.which("ucx_info", path=path) or "ucx_info", "-v"]
    try:
        told = subprocess.check_output(
            command,
            env=dict(environ),
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=UCX_INFO_DEADLINE_S,
        )
    except (OSError, subprocess.SubprocessError):
        return "", ""
    found = re.search(r"Library version: (\S+)", told)
    library = re.search(r"Library path: (\S+)", told)
    return found[1] if found else "", os.path.dirname(library[1]) if library else ""


def _version(project: str) -> str:
    """Return the version of a package of RAPIDS, whose name on PyPI ends with CUDA's version."""
    for name in (f"{project}-cu13", f"{project}-cu12", project):
        with contextlib.suppress(PackageNotFoundError):
            return version(name)
    return ""


def _modules(folder: str) -> tuple[str, ...]:
    files = glob.glob(f"{glob.escape(folder)}/ucx/*") if folder else []
    return tuple(sorted({match[1] for file in files if (match := MODULE.search(file))}))


def ucx_environment(spec: WorkerSpec, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set in a worker before UCX starts; the user's own stay."""
    found: dict[str, str] = {}
    if spec.enable_nvlink is False:
        found["UCX_TLS"] = "^cuda_ipc"
    if spec.port_range is not None:  # of the data's own connections, since UCX 1.16
        found["UCX_TCP_PORT_RANGE"] = spec.port_range
    return {name: value for name, value in found.items() if name not in environ}


#: How long UCX waits at each function.
GRACE = "UCX_MEM_BISTRO_GRACE_DURATION"
#: What UCX reads once, and each process is to have a file of its own by.
PER_PROCESS = {"UCX_LOG_FILE", "UCX_PROFILE_MODE", "UCX_STATS_DEST"}
#: Events of device memory that is allocated and freed, in ``ucm.h``.
DEVICE_EVENTS = 1 << 20 | 1 << 21
#: What NVIDIA's driver shows where NVLink also joins nodes.
NVLINK_BETWEEN_NODES = "/dev/nvidia-caps-imex-channels/*"


def install() -> None:
    """Load UCX and install its hooks, also for later forks, while there is one thread."""
    if PER_PROCESS & set(os.environ) or len(os.listdir("/proc/self/task")) > 1:
        return
    chosen = GRACE in os.environ
    try:
        import libucx

        os.environ |= environment(os.environ)
        os.environ.setdefault(GRACE, "0")
        libucx.load_library()
        _install_for_device(ctypes.CDLL("libucm.so.0"))
    except (ImportError, OSError, AttributeError):
        pass
    finally:
        if not chosen:
            os.environ.pop(GRACE, None)


def _install_for_device(ucm: ctypes.CDLL) -> None:
    """Make UCX install its hooks into the CUDA driver, if there is one."""
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    silent = kind(lambda event, details, argument: None)
    if ucm.ucm_set_event_handler(DEVICE_EVENTS, 0, silent, None) == 0:
        ucm.ucm_unset_event_handler(DEVICE_EVENTS, silent, None)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of ucxx and UCX for a worker; the user's own stay, but for the mode."""
    wanted = {
        "UCX_LOG_FILE": "stderr",  # instead of stdout, which is the program's
        "UCXX_LOG_LEVEL": "fatal",  # a peer that closes is reported as an error
        "UCX_WARN_UNUSED_ENV_VARS": "n",
        "UCX_TCP_TX_SEG_SIZE": "256k",  # host arrays: 1 GB in 0.67 s, not 0.8
        "UCX_TCP_RX_SEG_SIZE": "256k",
    }
    if not glob.glob(NVLINK_BETWEEN_NODES):
        wanted["UCX_CUDA_IPC_ENABLE_MNNVL"] = "n"  # 0.4 s of the first exchange
    given = {name: environ.get(name, value) for name, value in wanted.items()}
    return {**given, "UCXPY_PROGRESS_MODE": "blocking"}  # others drive UCX beside `ucx.Progress`
