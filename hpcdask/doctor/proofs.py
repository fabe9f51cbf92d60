"""Proofs that GPUs work, by short processes: CUDA's packages load, and NCCL sums over all GPUs.

A process prints lines of JSON before and after each step, which show where it hangs or dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections import ChainMap
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from dask.utils import format_bytes

from hpcdask.bootstrap.environment import interpreter
from hpcdask.comm.ucx_config import MODULE
from hpcdask.errors import installing, root_cause
from hpcdask.gpu import nccl
from hpcdask.gpu.driver import read
from hpcdask.logs import plural, some
from hpcdask.spec.records import Record

from .report import Finding, slow, together
from .software import fitting_extra

if TYPE_CHECKING:
    from .nodes import Node

of_stack, of_nccl = partial(Finding, "stack"), partial(Finding, "NCCL")
#: Seconds for loading the packages, and for one all-reduce, from the start of its processes.
STACK_DEADLINE_S, NCCL_DEADLINE_S = 30.0, 60.0
#: Seconds in which a killed process has left, unless a driver or file system holds it.
LEAVE_S = 10.0
#: Bytes of each sum over NCCL, and number of sums.
NBYTES, REPEATS = 2**28, 10
#: Settings by which NCCL tells why it fails, at once.
SPEAK = {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": "/dev/stdout"}
STACK_ADVICE = {
    "cupy": 'CuPy has to fit the driver: pip install "cupy-{extra}x[ctk]" in a new environment',
    "GPUs": "See nvidia-smi: is it exclusive, or broken? CUDA_VISIBLE_DEVICES can leave it out",
    "rmm": "Install the rmm of the same CUDA as cupy: {install}",
    "ucxx": "Install distributed-ucxx of cupy's CUDA; a UCX of the site must be the one it is for",
}
REDUCE = "all-reduce"
#: By step, in order.
NCCL_ADVICE = {
    "start": "See python -c 'import cupy' on this node, and whether its file system answers",
    "library": "Install NCCL for the CUDA of CuPy; torch's wheels bring it, too",
    "communicator": "Name the nodes' network with NCCL_SOCKET_IFNAME; see NCCL_DEBUG=INFO",
    REDUCE: "Find the broken way: set NCCL_P2P_DISABLE, NCCL_IB_DISABLE or NCCL_SHM_DISABLE to 1",
}


@dataclass(frozen=True)
class Outcome(Record):
    """Steps that a process printed, and its exit code; None if it was given up, or never began."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    ended: int | None = None

    @property
    def merged(self) -> dict[str, Any]:
        """All facts of the steps, the last one of each name."""
        return dict(ChainMap(*reversed(self.steps)))

    def ending(self, deadline_s: float) -> str:
        """Return how a process ended that had this deadline."""
        if self.ended is None:
            return f"no answer within {deadline_s:g} s"
        return f"its process ended with code {self.ended}"


# The processes


def _tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


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


#: Steps in order, each with the package that it is about.
STEPS: dict[str, tuple[str, Callable[[], str]]] = {
    "cupy": ("cupy", _cupy),
    "GPUs": ("cupy", _gpus),
    "rmm": ("rmm", _rmm),
    "ucxx": ("distributed_ucxx", _ucxx),
}


def _load() -> None:
    """Take the steps, without those of packages that are not installed."""
    for name, (package, step) in STEPS.items():
        if find_spec(package) is None:
            continue
        _tell(step=name)
        started = time.monotonic()
        try:
            done = {"text": step()}
        except Exception as error:
            done = {"error": root_cause(error)}
        _tell(**done, step=name, seconds=round(time.monotonic() - started, 2))


def _reduce(word: str) -> None:
    """Be the ``host``, by which the others find each other, or one rank of an all-reduce."""
    _tell(step="library")
    try:
        if reason := nccl.missing():
            _tell(error=reason)
            return
        _tell(step="communicator", version=nccl.version())
        if word == "host":
            _tell(id=nccl.unique_id().hex())
            sys.stdin.read()
            return
        order = json.loads(word)
        joined = nccl.join(order["number"], len(order["gpus"]), bytes.fromhex(order["id"]))
        _tell(step=REDUCE)
        seconds, right = nccl.all_reduce(joined, order["nbytes"], REPEATS)
        _tell(seconds=seconds, right=right)
        joined.destroy()
    except Exception as error:
        _tell(error=root_cause(error))


# Their parent


async def prove_stack() -> Outcome:
    """Return the steps by which a process loads the packages and uses each GPU once."""
    return await _hear(await _start(), STACK_DEADLINE_S)


def members(nodes: Iterable[Node]) -> dict[str, tuple[int, str]]:
    """Return the GPUs that the ranks would use, by UUID: the rank that has it, and its name."""
    found: dict[str, tuple[int, str]] = {}
    for node in nodes:
        for rank, gpus in node.assign()[0].items():
            for gpu in gpus:
                found.setdefault(gpu.uuid, (rank, f"GPU {gpu.index} of {node.name}"))
    return found


async def measure(
    every: Mapping[str, tuple[int, str]],
    ask: Callable[[int, dict[str, Any]], Awaitable[list[Outcome]]],
) -> list[tuple[str, Outcome]]:
    """Measure an all-reduce between all `members`; return each one's name and outcome.

    `ask` sends an order to a rank, and returns the outcomes of the rank's GPUs, in order.
    """
    if len(every) < 2:
        return [(name, Outcome()) for _, name in every.values()]
    host = await _start("host", **SPEAK)
    try:
        known = await _hear(host, NCCL_DEADLINE_S, until="id")
        if not (unique_id := known.merged.get("id")):
            return [(name, known) for _, name in every.values()]
        gpus = [(rank, uuid) for uuid, (rank, _) in every.items()]
        order = {"id": unique_id, "nbytes": NBYTES, "gpus": gpus}
        answers = await asyncio.gather(*(ask(rank, order) for rank in dict(gpus)))
    finally:
        await _kill(host)
    outcomes = dict(zip(dict(gpus), map(iter, answers), strict=True))
    return [(name, next(outcomes[rank], Outcome())) for rank, name in every.values()]


async def obey(rank: int, order: dict[str, Any]) -> list[Outcome]:
    """Run the processes of a rank's GPUs, and return their outcomes in order."""

    async def reduce(number: int, uuid: str) -> Outcome:
        word = json.dumps({**order, "number": number})
        process = await _start(word, CUDA_VISIBLE_DEVICES=uuid, **SPEAK)
        return await _hear(process, NCCL_DEADLINE_S)

    own = [(number, uuid) for number, (of, uuid) in enumerate(order["gpus"]) if of == rank]
    return await asyncio.gather(*(reduce(*gpu) for gpu in own))


async def _start(*arguments: str, **variables: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(*interpreter(), "-m", "hpcdask.doctor.proofs", *arguments),
        stdin=asyncio.subprocess.PIPE,  # whose end shows that this process has ended
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**os.environ, **variables},
    )


async def _hear(
    process: asyncio.subprocess.Process, deadline_s: float, until: str | None = None
) -> Outcome:
    """Return the steps of a process until it ends or tells `until`; kill it at the deadline."""
    assert process.stdout is not None
    found: list[dict[str, Any]] = []
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
            async for line in process.stdout:
                _, is_nccl, text = line.partition(b"NCCL WARN ")
                if line.startswith(b"{"):  # libraries print, too
                    found.append(json.loads(line))
                elif is_nccl:
                    found.append({"warned": text.decode(errors="replace").strip()[:300]})
                if found and until in found[-1]:
                    return Outcome(found)
            return Outcome(found, await process.wait())
    await _kill(process)
    return Outcome(found)


async def _kill(process: asyncio.subprocess.Process) -> None:
    """Kill a process, and wait for its end for a while: a driver that hangs may hold it."""
    with contextlib.suppress(ProcessLookupError, TimeoutError):
        process.kill()
        await asyncio.wait_for(process.wait(), LEAVE_S)


# What the outcomes mean


def check_stack(known: Outcome, node: Node) -> Iterator[Finding]:
    """Yield findings on the steps that were tried."""
    extra, last = fitting_extra(node), "Python"

    def failed(step: str, reason: str) -> Finding:
        advice = STACK_ADVICE.get(step, "See python -m hpcdask.doctor.proofs")
        advice = advice.format(extra=extra, install=installing(extra))
        return of_stack(f"{step} fails", "error", reason, advice)

    for step in known.steps:
        name = step["step"]
        if name == "ucxx" and "cuda" not in step.get("text", "cuda"):
            value = f"{step['text']}, not its CUDA module, so NVLink is not used"
            see = "See what UCX says: UCX_LOG_LEVEL=debug python -m hpcdask.doctor.proofs"
            yield slow("stack", "ucxx works", value, see)
        elif "text" in step:
            yield of_stack(f"{name} works", "ok", f"{step['text']} ({step['seconds']:.1f} s)")
        elif "error" in step:
            yield failed(name, step["error"])
        last = "Python" if "seconds" in step else name
    if known.ended != 0:
        yield failed(last, known.ending(STACK_DEADLINE_S))


def check_nccl(known: Sequence[tuple[str, Outcome]] | None) -> Iterator[Finding]:
    """Yield the findings on a measurement; none where it was not asked for."""
    if known is None:
        return
    count = len(known)
    if count < 2:
        yield of_nccl(REDUCE, "ok", f"{plural(count, 'GPU')} in this launch: nothing to check")
        return
    told = [(name, outcome.merged) for name, outcome in known]
    versions = together((one["version"], name) for name, one in told if "version" in one)
    if len(versions) > 1:
        value = "; ".join(f"{one} on {some(names, 2)}" for one, names in versions.items())
        yield of_nccl("version", "error", value, "Use one environment on all nodes")
    elif versions:
        yield of_nccl("version", "ok", *versions)
    causes = together((cause, name) for name, one in known if (cause := _cause(one)))
    if not causes:
        seconds = max(one["seconds"] for _, one in told)
        rate = nccl.bus_bandwidth(NBYTES, seconds, count) / 1e9
        value = f"right between {count} GPUs, {rate:.3g} GB/s bus bandwidth"
        yield of_nccl(REDUCE, "ok", f"{value} with {format_bytes(NBYTES)} of each")
        return
    # those that hang at the last step wait for those that failed
    hang = Outcome().ending(NCCL_DEADLINE_S)
    waits = (max((step for step, _ in causes), key=list(NCCL_ADVICE).index), hang)
    for cause, names in sorted(causes.items(), key=lambda one: one[0] == waits):
        where, advice = "all GPUs" if len(names) == count else some(names), NCCL_ADVICE[cause[0]]
        if cause == waits and len(causes) > 1:
            where, advice = plural(len(names), "other GPU"), "See what is wrong with those above"
        yield of_nccl(REDUCE, "error", f"{where}: {cause[1]} ({cause[0]})", advice)


def _cause(outcome: Outcome) -> tuple[str, str] | None:
    """Return the step at which a process failed, and the reason; None where it did not."""
    known = outcome.merged
    if known.get("right") and outcome.ended == 0:
        return None
    text = "the sum is wrong" if known.get("right") is False else known.get("error")
    said = f". NCCL says: {known['warned']}" if "warned" in known else ""
    return known.get("step", "start"), f"{text or outcome.ending(NCCL_DEADLINE_S)}{said}"


if __name__ == "__main__":
    _reduce(sys.argv[1]) if sys.argv[1:] else _load()
