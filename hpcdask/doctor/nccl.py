"""NCCL between all GPUs of a launch, for ``--nccl``.

A short process for each GPU sums arrays with the others. It prints a line of JSON at each step,
which shows where it hangs or dies.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dask.utils import format_bytes

from hpcdask.gpu import nccl
from hpcdask.logs import plural, some

from .findings import Finding, Reporter
from .nodes import Node
from .stack import Told, hear, kill, one_line, start, tell

say = Reporter("NCCL")
MODULE = "hpcdask.doctor.nccl"
#: Seconds for one all-reduce, from the start of its processes.
DEADLINE_S = 60.0
#: Bytes of each sum, and number of sums.
NBYTES, REPEATS = 2**28, 10
#: Settings by which NCCL tells why it fails, at once.
SPEAK = {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": "/dev/stdout"}
TOPIC = "all-reduce"
ADVICE = {
    "start": "See python -c 'import cupy' on this node, and whether its file system answers",
    "library": "Install NCCL for the CUDA of CuPy; torch's wheels bring it, too",
    "communicator": "NCCL's processes have to reach each other: name the network with "
    "NCCL_SOCKET_IFNAME, and see what NCCL says with NCCL_DEBUG=INFO",
    TOPIC: "The way between the GPUs is broken. To find it, leave one out: NCCL_P2P_DISABLE=1, "
    "NCCL_IB_DISABLE=1 or NCCL_SHM_DISABLE=1",
}


class Member(NamedTuple):
    """GPU, and the rank of the launch that starts its process."""

    rank: int
    name: str
    uuid: str


@dataclass(frozen=True)
class Measured:
    """All-reduce of GPUs: their names, and the report of each one's process."""

    names: list[str]
    told: list[Told]


#: Function that sends an order to a rank, and returns its processes' reports by NCCL's rank.
Ask = Callable[[int, dict[str, Any]], Awaitable[dict[str, Told]]]


def members(nodes: Iterable[Node]) -> list[Member]:
    """Return the GPUs that the ranks would use, each once."""
    found: dict[str, Member] = {}
    for node in nodes:
        numbers = {gpu.uuid: gpu.index for gpu in node.gpus}
        for rank, gpus in node.assigned().items():
            for gpu in gpus:
                name = f"GPU {numbers[gpu.uuid]} of {node.name}"
                found.setdefault(gpu.uuid, Member(rank, name, gpu.uuid))
    return list(found.values())


async def measure(every: Sequence[Member], ask: Ask) -> Measured:
    """Measure an all-reduce between all GPUs."""
    names = [one.name for one in every]
    if len(every) < 2:
        return Measured(names, [])
    host = await start(MODULE, "host", **SPEAK)
    try:
        known = await hear(host, DEADLINE_S, until="id")
        if not (unique_id := known.merged.get("id")):
            return Measured(names, [known] * len(every))
        orders: dict[int, dict[str, Any]] = {}
        for number, one in enumerate(every):
            empty = {"id": unique_id, "size": len(every), "nbytes": NBYTES, "gpus": {}}
            orders.setdefault(one.rank, empty)["gpus"][str(number)] = one.uuid
        answers = await asyncio.gather(*(ask(*order) for order in orders.items()))
    finally:
        await kill(host)
    found = {number: told for answer in answers for number, told in answer.items()}
    return Measured(names, [found.get(str(number), Told()) for number in range(len(every))])


async def obey(order: dict[str, Any]) -> dict[str, Told]:
    """Run the processes of a rank's GPUs, and return their reports by NCCL's rank."""

    async def one(number: str, uuid: str) -> Told:
        word = json.dumps({**order, "number": int(number)})
        process = await start(MODULE, word, CUDA_VISIBLE_DEVICES=uuid, **SPEAK)
        return await hear(process, DEADLINE_S)

    numbers = order["gpus"]
    found = await asyncio.gather(*(one(*pair) for pair in numbers.items()))
    return dict(zip(numbers, found, strict=True))


# What it means


def check(known: Measured | None) -> Iterator[Finding]:
    """Yield the findings on a measurement; none where it was not asked for."""
    if known is None:
        return
    count = len(known.names)
    if count < 2:
        there = "one GPU" if known.names else "no GPU"
        yield say.ok(TOPIC, f"{there} known in this launch: there is nothing to check")
        return
    versions: dict[str, list[str]] = {}
    causes: dict[tuple[str, str], list[str]] = {}
    for name, told in zip(known.names, known.told, strict=True):
        if version := told.merged.get("version"):
            versions.setdefault(version, []).append(name)
        if cause := _cause(told):
            causes.setdefault(cause, []).append(name)
    if len(versions) == 1:
        yield say.ok("version", *versions)
    elif versions:
        value = "; ".join(f"{one} on {some(names, 2)}" for one, names in versions.items())
        yield say.error("version", value, "Use one environment on all nodes")
    if not causes:
        seconds = max(told.merged["seconds"] for told in known.told)
        rate = nccl.bus_bandwidth(NBYTES, seconds, count) / 1e9
        value = f"right between {count} GPUs, {rate:.3g} GB/s bus bandwidth"
        yield say.ok(TOPIC, f"{value} with {format_bytes(NBYTES)} of each")
        return
    steps = list(ADVICE)
    waits = (max((step for step, _ in causes), key=steps.index), _hang())  # for those that failed
    for (step, text), names in sorted(causes.items(), key=lambda one: one[0] == waits):
        where, advice = "all GPUs" if len(names) == count else some(names), ADVICE[step]
        if (step, text) == waits and len(causes) > 1:
            where, advice = plural(len(names), "other GPU"), "See what is wrong with those above"
        yield say.error(TOPIC, f"{where}: {text} ({step})", advice)


def _hang() -> str:
    return f"no answer within {DEADLINE_S:g} s"


def _cause(told: Told) -> tuple[str, str] | None:
    """Return the step at which a process failed, and the reason; None where it did not."""
    known = told.merged
    if known.get("right") and told.ended == 0:
        return None
    text = "the sum is wrong" if "right" in known and not known["right"] else known.get("error")
    text = text or (_hang() if told.ended is None else f"its process ended with code {told.ended}")
    said = f". NCCL says: {known['warned']}" if "warned" in known else ""
    return str(known.get("step", "start")), f"{text}{said}"


# The processes


def main(word: str) -> None:
    """Be the host, by which the others find each other, or one rank of an all-reduce."""
    tell(step="library")
    try:
        if reason := nccl.missing():
            tell(error=reason)
            return
        tell(step="communicator", version=nccl.version())
        if word == "host":
            tell(id=nccl.unique_id().hex())
            sys.stdin.read()
            return
        order = json.loads(word)
        joined = nccl.join(order["number"], order["size"], bytes.fromhex(order["id"]))
        tell(step=TOPIC)
        seconds, right = nccl.all_reduce(joined, order["nbytes"], REPEATS)
        tell(seconds=seconds, right=right)
        joined.destroy()
    except Exception as error:
        tell(error=one_line(error))


if __name__ == "__main__":
    main(sys.argv[1])
