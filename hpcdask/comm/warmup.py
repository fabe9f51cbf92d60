"""First exchange between peers, and its verdict."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distributed.comm import get_address_host

from hpcdask.logs import plural

if TYPE_CHECKING:
    from distributed import Scheduler

#: Where workers tell that they are warm.
TOPIC = "hpcdask-warm"
#: Peers on other nodes that a worker warms its connections with.
FAR_PEERS = 8
#: Warnings of a kind that are told.
TOLD = 5
NO_IPC_CAUSES = (
    "See `hpcdask doctor` there: it may be UCX_TLS, a job that is confined to its GPUs, or PCIe "
    "without access from GPU to GPU"
)


@dataclass(frozen=True)
class LinkTest:
    """Result of a worker's first fetch from another.

    ``first_s`` are the seconds of the first, small transfer, in which memory is mapped, ``rate``
    the bytes per second of a larger one after it. ``cuda_ipc``: whether UCX maps device memory of
    one in the other; None if that is not known. ``problem`` is why nothing came; the rest is then
    void.
    """

    to: str
    source: str
    transport: str = ""
    first_s: float = 0.0
    rate: float = 0.0
    same_host: bool = True
    cuda_ipc: bool | None = None
    problem: str = ""


@dataclass(frozen=True)
class WarmupReport:
    """Results of all links, with a line for each worker or pair that is slow or broken."""

    line: str
    warnings: tuple[str, ...]


def evaluate(links: Sequence[LinkTest], *, on_device: bool) -> WarmupReport:
    """Say which transport workers use and whether it is the fast one, by all links or some."""
    warnings = _few(
        f"no data came from worker {link.source} to {link.to}: {link.problem}"
        for link in links
        if link.problem
    )
    sound = [link for link in links if not link.problem]
    warnings += _few(
        f"data from worker {link.source} to {link.to} goes over tcp, not ucx"
        for link in sound
        if link.transport == "tcp"
    )
    ucx = [link for link in sound if link.transport == "ucx"]
    near = [link for link in ucx if link.same_host]
    without = [link for link in near if on_device and link.cuda_ipc is False]
    warnings += _few(
        f"slow: between workers {a} and {b}, on one node, CUDA IPC (NVLink) is not in use. "
        f"{NO_IPC_CAUSES}"
        for a, b in sorted({tuple(sorted((link.to, link.source))) for link in without})
    )
    if not ucx:
        return WarmupReport("no data over ucx", tuple(warnings))
    pairs = len({frozenset((link.to, link.source)) for link in ucx})
    least = min(link.rate for link in ucx) / 1e9
    what = f"ucx between {plural(pairs, 'pair')} of workers"
    if on_device and near and all(link.cuda_ipc for link in near):
        what += ", CUDA IPC is active"
    return WarmupReport(f"{what} ({least:.3g} GB/s or more)", tuple(warnings))


def transport_of(scheduler: Scheduler | None, *, on_device: bool) -> str:
    """Return how the workers exchange; empty while two have not told that they are warm."""
    if scheduler is None:
        return ""
    names = {str(worker.name) for worker in scheduler.workers.values()}
    events = [event for _, event in scheduler.get_events(TOPIC) if event["name"] in names]
    links = [LinkTest(**link) for event in events for link in event["links"]]
    links = [link for link in links if {link.to, link.source} <= names]
    if links:
        return evaluate(links, on_device=on_device).line
    return "tcp between workers" if len(events) > 1 else ""


def _few(warnings: Iterable[str]) -> list[str]:
    """The first of one kind, and how many more there are."""
    told = list(warnings)
    more = [f"the same for {plural(len(told) - TOLD, 'more link')}"] if len(told) > TOLD else []
    return told[:TOLD] + more


def choose_peers(me: str, addresses: list[str]) -> list[str]:
    """Whom a new worker gets warm with: all on its node, and some on others, the first to come."""
    others = [address for address in addresses if address != me]
    here = get_address_host(me)
    near = [address for address in others if get_address_host(address) == here]
    far = [address for address in others if get_address_host(address) != here]
    # not all begin with the same one
    turn = hash(me) % len(near) if near else 0
    return near[turn:] + near[:turn] + far[-FAR_PEERS:]
