"""First exchange between peers, and its result in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import dask
from dask.utils import parse_timedelta
from distributed.comm import get_address_host

from hpcdask.logs import plural

if TYPE_CHECKING:
    from distributed import Scheduler

#: Where workers tell that they are warm.
TOPIC = "hpcdask-warm"
#: Peers on other nodes that a worker warms its connections with.
FAR_PEERS = 8
#: Warnings of a kind that are printed.
TOLD = 5


@dataclass(frozen=True)
class LinkTest:
    """Result of a worker's first fetch from another.

    ``rate`` is in bytes per second; ``cuda_ipc`` tells whether UCX maps device memory, None if
    unknown or on the CPU; ``unknown_ucx`` is a version whose mappings hpcdask cannot release.
    """

    to: str
    source: str
    transport: str = ""
    rate: float = 0.0
    same_host: bool = True
    cuda_ipc: bool | None = None
    problem: str = ""
    unknown_ucx: str = ""


def evaluate(links: Sequence[LinkTest]) -> tuple[str, list[str]]:
    """Return how the workers exchange, by some or all links, and warnings of slow or broken ones.

    Each warning is a line, for a worker or a pair.
    """
    sound = [link for link in links if not link.problem]
    ucx = [link for link in sound if link.transport == "ucx"]
    near = [link for link in ucx if link.same_host]
    without = [link for link in near if link.cuda_ipc is False]
    broken = [link for link in links if link.problem]
    slow = [link for link in sound if link.transport == "tcp"]
    warnings = [
        *_few(f"no data came from {one.source} to {one.to}: {one.problem}" for one in broken),
        *_few(f"data from worker {one.source} to {one.to} goes over tcp, not ucx" for one in slow),
        *_few(
            f"slow: between workers {a} and {b}, on one node, CUDA IPC (NVLink) is not in use. See "
            f"`hpcdask doctor` there: it may be UCX_TLS, a job that is confined to its GPUs, or "
            f"PCIe without access from GPU to GPU"
            for a, b in sorted({tuple(sorted((link.to, link.source))) for link in without})
        ),
        *_few(
            f"UCX {version} is not known to hpcdask: when a worker dies, GPU memory that others "
            f"have mapped of it stays allocated until they end. Use UCX 1.21, or restart all "
            f"workers then"
            for version in sorted({link.unknown_ucx for link in links} - {""})
        ),
    ]
    if not ucx:
        return "no data over ucx", warnings
    line = f"ucx between {plural(len({frozenset((link.to, link.source)) for link in ucx}), 'pair')}"
    ipc = near and all(link.cuda_ipc for link in near)
    line += f" of workers{', CUDA IPC is active' if ipc else ''}"
    least = min(link.rate for link in ucx) / 1e9
    return f"{line} ({least:.3g} GB/s or more)", warnings


def transport_of(scheduler: Scheduler | None) -> str:
    """Return how the workers exchange and the first warning; empty while two are not warm."""
    if scheduler is None:
        return ""
    names = {str(worker.name) for worker in scheduler.workers.values()}
    events = [event for _, event in scheduler.get_events(TOPIC) if event["name"] in names]
    links = [LinkTest(**link) for event in events for link in event["links"]]
    links = [link for link in links if {link.to, link.source} <= names]
    if links:
        line, warnings = evaluate(links)
        return "; ".join((line, *warnings[:1]))
    return "tcp between workers" if len(events) > 1 else ""


def _few(warnings: Iterable[str]) -> list[str]:
    """Return the first of one kind, and how many more there are."""
    told = list(warnings)
    more = len(told) - TOLD
    return told[:TOLD] + [f"the same for {plural(more, 'more link')}"] * (more > 0)


def choose_peers(me: str, addresses: list[str]) -> list[str]:
    """Return the peers that a new worker exchanges with first: all on its node, some on others."""
    others = [address for address in addresses if address != me]
    here = get_address_host(me)
    near = [address for address in others if get_address_host(address) == here]
    far = [address for address in others if get_address_host(address) != here]
    # not all begin with the same one
    turn = hash(me) % len(near) if near else 0
    return near[turn:] + near[:turn] + far[-FAR_PEERS:]


def connect_timeout() -> float:
    """Return the user's ``distributed.comm.timeouts.connect`` in seconds."""
    return float(parse_timedelta(dask.config.get("distributed.comm.timeouts.connect")))
