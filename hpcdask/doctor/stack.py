"""Proof that the CUDA packages load: a short process imports them and uses each GPU once.

The process prints a line of JSON before and after each step, which shows where it hangs or dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from hpcdask.bootstrap.environment import interpreter
from hpcdask.comm.ucx_config import MODULE
from hpcdask.gpu.driver import read
from hpcdask.logs import plural
from hpcdask.spec.records import Record

from .findings import Finding, Reporter

if TYPE_CHECKING:
    from .nodes import Node

say = Reporter("stack")
DEADLINE_S = 30.0
#: Seconds in which a killed process has left, unless a driver or file system holds it.
LEAVE_S = 10.0
ADVICE = {
    "cupy": "CuPy has to fit the driver and finds CUDA's libraries as packages: pip install "
    '"cupy-cuda{cuda}x[ctk]" in a new environment',
    "GPUs": "The GPU may be in use in exclusive mode, or broken: see nvidia-smi, or leave it out "
    "with CUDA_VISIBLE_DEVICES",
    "rmm": "Install the rmm of the same CUDA as cupy: pip install rmm-cu{cuda}",
    "ucxx": "Install distributed-ucxx of the same CUDA as cupy; with a UCX of the site, see that "
    "it is the one that ucxx was made for",
}


@dataclass(frozen=True)
class Told(Record):
    """Steps that a process printed, and its exit code; None if it was given up, or never began."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    ended: int | None = None

    @property
    def merged(self) -> dict[str, Any]:
        """All facts of the steps, the last one of each name."""
        return {name: value for step in self.steps for name, value in step.items()}


# The process


def steps() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the proofs in order, without those of packages that are not installed."""
    if find_spec("cupy"):
        yield "cupy", _cupy
        yield "GPUs", _gpus
    if find_spec("rmm"):
        yield "rmm", _rmm
    if find_spec("ucxx") and find_spec("distributed_ucxx"):
        yield "ucxx", _ucxx


def _cupy() -> str:
    import cupy

    return f"{cupy.__version__}, CUDA {cupy.cuda.runtime.runtimeGetVersion() // 1000}"


def _gpus() -> str:
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    for number in range(count):
        with cupy.cuda.Device(number):
            if float((cupy.arange(2.0**17) + 1).sum()) != 2**16 * (2**17 + 1):
                raise ArithmeticError(f"GPU {number} adds wrongly")
    return f"a context, 1 MiB and a sum on {plural(count, 'GPU')}"


def _rmm() -> str:
    import rmm

    rmm.DeviceBuffer(size=2**20)
    return f"{rmm.__version__}"


def _ucxx() -> str:
    import distributed_ucxx  # noqa: F401
    import ucxx

    ucxx.init()
    version = ".".join(map(str, ucxx.get_ucx_version()))
    lines = read("/proc/self/maps").splitlines()
    loaded = sorted({match[1] for line in lines if (match := MODULE.search(line))})
    return f"UCX {version} loads {', '.join(loaded) or 'no module'}"


def tell(**facts: object) -> None:
    """Print a line of JSON for the parent."""
    print(json.dumps(facts), flush=True)


def one_line(error: Exception) -> str:
    """Return the class and text of an error."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]


def main() -> None:
    """Run the steps, each reported on standard output."""
    for name, step in steps():
        tell(step=name)
        started = time.monotonic()
        try:
            done = {"text": step()}
        except Exception as error:
            done = {"error": one_line(error)}
        tell(**done, step=name, seconds=round(time.monotonic() - started, 2))


# Its parent


async def prove() -> Told:
    """Return the steps of the process, until it ends or the deadline."""
    return await hear(await start("hpcdask.doctor.stack"), DEADLINE_S)


async def start(module: str, *arguments: str, **variables: str) -> asyncio.subprocess.Process:
    """Start a module in a process that reports on standard output."""
    return await asyncio.create_subprocess_exec(
        *(*interpreter(), "-m", module, *arguments),
        stdin=asyncio.subprocess.PIPE,  # whose end shows that this process has ended
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, **variables},
    )


async def hear(
    process: asyncio.subprocess.Process, deadline_s: float, until: str | None = None
) -> Told:
    """Return the steps of a process until it ends or tells `until`; kill it at the deadline."""
    assert process.stdout is not None
    found: list[dict[str, Any]] = []
    try:
        async with asyncio.timeout(deadline_s):
            async for line in process.stdout:
                _, is_nccl, text = line.partition(b"NCCL WARN ")
                if line.startswith(b"{"):  # libraries print, too
                    found.append(json.loads(line))
                elif is_nccl:
                    found.append({"warned": text.decode(errors="replace").strip()[:300]})
                if found and until in found[-1]:
                    return Told(found)
            return Told(found, await process.wait())
    except TimeoutError:
        await kill(process)
    return Told(found)


async def kill(process: asyncio.subprocess.Process) -> None:
    """Kill a process, and wait for its end for a while: a driver that hangs may hold it."""
    with contextlib.suppress(ProcessLookupError, TimeoutError):
        process.kill()
        await asyncio.wait_for(process.wait(), LEAVE_S)


def check(known: Told, node: Node) -> Iterator[Finding]:
    """Yield findings on the steps that were tried."""
    last = "Python"
    for step in known.steps:
        name = step["step"]
        if name == "ucxx" and "cuda" not in step.get("text", "cuda"):
            value = f"{step['text']}, not its CUDA module, so NVLink is not used"
            advice = "See what UCX says: UCX_LOG_LEVEL=debug python -m hpcdask.doctor.stack"
            yield say.slow("ucxx works", value, advice)
        elif "text" in step:
            yield say.ok(f"{name} works", f"{step['text']} ({step['seconds']:.1f} s)")
        elif "error" in step:
            yield say.error(f"{name} fails", step["error"], _advice(name, node))
        last = "Python" if "seconds" in step else name
    if known.ended != 0:
        what = f"ended its process with code {known.ended}"
        if known.ended is None:
            what = f"did not answer within {DEADLINE_S:g} s"
        yield say.error(f"{last} fails", what, _advice(last, node))


def _advice(step: str, node: Node) -> str:
    advice = ADVICE.get(step, "See python -m hpcdask.doctor.stack")
    return advice.format(cuda=node.cuda)


if __name__ == "__main__":
    main()
