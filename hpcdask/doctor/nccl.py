"""NCCL between all GPUs of a launch: ``--nccl``.

One short process for each GPU sums arrays with the others. It prints a line of JSON at each step,
so that one that hangs or dies still says where. Where all together fail, neighbours try it in
pairs, which tells a broken link from a broken GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

from hpcdask.gpu import nccl
from hpcdask.logs import plural, some

from .findings import Facts, Finding, Reporter, amount
from .launch import Launch
from .nodes import assemble
from .queue import assigned
from .stack import heard, kill, start, told_in

say = Reporter("NCCL")
MODULE = "hpcdask.doctor.nccl"
#: Seconds for one all-reduce, from the start of its processes.
DEADLINE_S = 60.0
#: So many bytes are summed, so often.
NBYTES, REPEATS = 2**28, 10
#: NCCL says why it fails, and into a file at once.
SPEAK = {"NCCL_DEBUG": "WARN", "NCCL_DEBUG_FILE": "/dev/stdout"}
TOPIC = "all-reduce"
ADVICE = {
    "start": "See python -c 'import cupy' on this node, and whether its file system answers",
    "library": "Install NCCL for the CUDA of CuPy: pip install nvidia-nccl-cu13 (or cu12); torch's "
    "wheels bring it, too",
    "communicator": "NCCL's processes have to reach each other: name the network with "
    "NCCL_SOCKET_IFNAME, and see what NCCL says with NCCL_DEBUG=INFO",
    TOPIC: "The way between the GPUs is broken. To find it, leave one out: NCCL_P2P_DISABLE=1, "
    "NCCL_IB_DISABLE=1 or NCCL_SHM_DISABLE=1",
}


class Member(NamedTuple):
    """A GPU, and the rank of the launch that starts its process."""

    rank: int
    host: str
    number: int
    uuid: str

    @property
    def name(self) -> str:
        """Return the name by which the user knows the member."""
        return f"GPU {self.number} of {self.host}"


#: Has a rank run an order, and returns what its processes told, by NCCL's rank.
Ask = Callable[[int, Facts], Awaitable[dict[str, Facts]]]


def members(launch: Launch) -> list[Member]:
    """The GPUs that the ranks would use, each once."""
    found: dict[str, Member] = {}
    for node in assemble(launch.reports, launch.hosts):
        numbers = {gpu["uuid"]: gpu["index"] for gpu in node.facts.get("gpus", {}).get("gpus", ())}
        for rank, gpus in assigned(node.facts, node.ranks).items():
            for gpu in gpus:
                found.setdefault(gpu.uuid, Member(rank, node.host, numbers[gpu.uuid], gpu.uuid))
    return list(found.values())


async def measure(every: Sequence[Member], ask: Ask) -> Facts:
    """An all-reduce between all, and between pairs of neighbours where that fails."""
    told = await _all_reduce(every, ask) if len(every) > 1 else []
    known: Facts = {"members": [one.name for one in every], "told": told, "pairs": []}
    if len(every) > 2 and _failed(told) and not any(map(_is_missing, told)):
        ring = [*zip(every, [*every[1:], every[0]], strict=True)]
        for first in (0, 1):  # nobody is in two pairs at once, but in the last of an odd ring
            pairs = ring[first::2]
            for pair, its in zip(
                pairs, await asyncio.gather(*(_all_reduce(one, ask) for one in pairs)), strict=True
            ):
                known["pairs"].append({"members": [one.name for one in pair], "told": its})
    return known


async def _all_reduce(every: Sequence[Member], ask: Ask) -> list[Facts]:
    """Return what the process of each member told."""
    host = await start(MODULE, "host", stdin=asyncio.subprocess.PIPE, environ=SPEAK)
    try:
        known = await _hosts(host)
        if not (unique_id := _merged(known).get("id")):
            return [known] * len(every)
        orders: dict[int, Facts] = {}
        for number, one in enumerate(every):
            empty = {"id": unique_id, "size": len(every), "nbytes": NBYTES, "gpus": {}}
            orders.setdefault(one.rank, empty)["gpus"][str(number)] = one.uuid
        answers = await asyncio.gather(*(ask(*order) for order in orders.items()))
    finally:
        await kill(host)
    found = {number: facts for answer in answers for number, facts in answer.items()}
    return [found.get(str(number), {"steps": [], "ended": None}) for number in range(len(every))]


async def _hosts(host: asyncio.subprocess.Process) -> Facts:
    """Return the id that the process told, by which the others will find it."""
    assert host.stdout is not None
    known: Facts = {"steps": [], "ended": None}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DEADLINE_S):
            async for line in host.stdout:
                known["steps"] += told_in(line)
                if "id" in _merged(known):
                    return known
            known["ended"] = await host.wait()
    return known


async def obey(order: Facts) -> dict[str, Facts]:
    """Run the processes of a rank's GPUs, and return what each told."""

    async def one(number: str, uuid: str) -> Facts:
        told = json.dumps({**order, "number": int(number)})
        environ = {"CUDA_VISIBLE_DEVICES": uuid, **SPEAK}
        return await heard(await start(MODULE, told, environ=environ), DEADLINE_S)

    numbers = order["gpus"]
    found = await asyncio.gather(*(one(*pair) for pair in numbers.items()))
    return dict(zip(numbers, found, strict=True))


# What it means


def check(known: Facts | None) -> Iterator[Finding]:
    """The findings of what `measure` returned; none where it was not asked for."""
    if known is None:
        return
    names, told = known["members"], known["told"]
    if len(names) < 2:
        there = "one GPU" if names else "no GPU"
        yield say.ok(TOPIC, f"{there} known in this launch: there is nothing to check")
        return
    versions: dict[str, list[str]] = {}
    for name, facts in zip(names, told, strict=True):
        if version := _merged(facts).get("version"):
            versions.setdefault(version, []).append(name)
    if len(versions) == 1:
        yield say.ok("version", *versions)
    elif versions:
        value = "; ".join(f"{one} on {some(its, 2)}" for one, its in versions.items())
        yield say.error("version", value, "Use one environment on all nodes")
    if not _failed(told):
        seconds = max(_merged(facts)["seconds"] for facts in told)
        rate = nccl.bus_bandwidth(NBYTES, seconds, len(names)) / 1e9
        value = f"right between {len(names)} GPUs, {rate:.3g} GB/s bus bandwidth"
        yield say.ok(TOPIC, f"{value} with {amount(NBYTES)} of each")
        return
    yield from _failures(names, told)
    broken = [pair for pair in known["pairs"] if _failed(pair["told"])]
    for pair in broken:
        for finding in _failures(pair["members"], pair["told"]):
            yield say.error(
                "pair", f"{' and '.join(pair['members'])}: {finding.value}", ADVICE[TOPIC]
            )
    if known["pairs"] and not broken:
        yield say.ok("pairs", "the all-reduce of each two neighbours is right")


def _failures(names: Sequence[str], told: Sequence[Facts]) -> Iterator[Finding]:
    """Those that failed, each cause once; those that only wait for them are counted."""
    causes: dict[tuple[str, str], list[str]] = {}
    for name, facts in zip(names, told, strict=True):
        if cause := _cause(facts):
            causes.setdefault(cause, []).append(name)
    hang = [cause for cause in causes if cause[1].startswith(_hang())]
    last = max((STEPS.index(step) for step, _ in hang), default=0)
    waits = [cause for cause in hang if STEPS.index(cause[0]) == last]
    if len(waits) == len(causes):  # for nobody else
        waits = []
    for cause, its in causes.items():
        step, text = cause
        if cause not in waits:
            where = "all GPUs" if len(its) == len(names) else some(its)
            yield say.error(TOPIC, f"{where}: {text} ({step})", ADVICE[step])
    for step, text in waits:
        others = plural(len(causes[step, text]), "other GPU")
        yield say.error(TOPIC, f"{others}: {text} ({step})", "See what is wrong with those above")


STEPS = list(ADVICE)


def _hang() -> str:
    return f"no answer within {DEADLINE_S:g} s"


def _cause(facts: Facts) -> tuple[str, str] | None:
    """The step at which a process failed, and what is known of why; None where it did not."""
    known = _merged(facts)
    if known.get("right") and facts["ended"] == 0:
        return None
    step, said = str(known.get("step", "start")), ""
    if "warned" in known:
        said = f". NCCL says: {known['warned']}"
    if "error" in known:
        return step, f"{known['error']}{said}"
    if "right" in known and not known["right"]:
        return step, "the sum is wrong"
    if facts["ended"] is None:
        return step, f"{_hang()}{said}"
    return step, f"its process ended with code {facts['ended']}{said}"


def _merged(facts: Facts) -> Facts:
    return {name: value for step in facts["steps"] for name, value in step.items()}


def _failed(told: Sequence[Facts]) -> bool:
    return any(map(_cause, told))


def _is_missing(facts: Facts) -> bool:
    return _merged(facts).get("step") == "library"


# The processes


def tell(**facts: object) -> None:
    """A line of JSON for whoever started this process."""
    print(json.dumps(facts), flush=True)


def main(word: str) -> None:
    """Be the host, which the others find each other by, or one rank of an all-reduce."""
    tell(step="library")
    try:
        if why := nccl.missing():
            tell(error=why)
            return
        tell(step="communicator", version=nccl.version())
        if word == "host":
            tell(id=nccl.unique_id().hex())
            sys.stdin.read()
        else:
            _take_part(json.loads(word))
    except Exception as error:
        tell(error=" ".join(f"{type(error).__name__}: {error}".split())[:500])


def _take_part(order: Facts) -> None:
    communicator = nccl.join(order["number"], order["size"], bytes.fromhex(order["id"]))
    tell(step=TOPIC)
    seconds, right = nccl.all_reduce(communicator, order["nbytes"], REPEATS)
    tell(seconds=seconds, right=right)
    communicator.destroy()


if __name__ == "__main__":
    main(sys.argv[1])
