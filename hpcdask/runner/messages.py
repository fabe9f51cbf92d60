"""Lines of rank 0 for the user: the cluster is ready, and how the first exchange went."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from hpcdask.comm.warmup import LinkTest, evaluate
from hpcdask.logs import plural, say, some
from hpcdask.node.placement import Inventory
from hpcdask.process import seconds_since_start
from hpcdask.spec import kinds
from hpcdask.spec.specs import RunSpec

from .link import Link
from .plan import Plan, WantedWorkers
from .protocol import RankLost, SchedulerLost, SchedulerStarted, WorkerFailed

LOOPBACK = "127.0.0.1"


def tell_ready(
    spec: RunSpec, plan: Plan, nodes: int, registered: int, started: SchedulerStarted
) -> None:
    """Say in one line what computes on what, how data travel, where the dashboard is."""
    placements = [one for group in plan.placements.values() for one in group]
    kinds = Counter(one.gpu.name if one.gpu else "CPU" for one in placements)
    what = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    network = "tcp with TLS" if spec.tls else "tcp without TLS"
    if plan.choice.protocol == "ucx":
        network = f"ucx between workers, {network} to the scheduler"
    if spec.protocol == "auto" and any(one.gpu for one in placements):
        network += f" ({plan.choice.reason})"
    planned = len(placements)
    count = plural(planned, "worker")
    if registered < planned:
        count = f"{registered} of {count}"
    elif registered > planned:
        count = plural(registered, "worker")
    say(
        f"{count} on {plural(nodes, 'node')} "
        f"({what}), {network}, ready in {seconds_since_start():.2f} s; "
        f"dashboard http://{_dashboard_host(started)}:{started.dashboard_port}/status"
    )


def tell_cpu(spec: RunSpec, seen: Mapping[int, Inventory], plan: Plan) -> None:
    """Say that workers compute on the CPU where no word of the user's says so."""
    if spec.device != "auto" or kinds.kinds(spec.groups):
        return
    if not any(one.gpus for one in seen.values()):
        say("no GPU here, so workers compute on the CPU (--device cpu says that this is meant)")
    elif blind := [seen[index] for index in plan.placements if not seen[index].gpus]:
        hosts = some(one.host for one in blind)
        say(f"{plural(len(blind), 'rank')} without a GPU on {hosts}, so on the CPU (--groups auto)")


def tell_ways_in(spec: RunSpec, started: SchedulerStarted, host: str, *, has_program: bool) -> None:
    """Say how clients connect where no program does, and how a browser elsewhere gets in.

    `host` is the node's name.
    """
    if not has_program:
        file = spec.scheduler_file
        way = f'hpcdask.connect("{file}")' if file else f'Client("{started.address}")'
        if spec.tls and not file:
            way = "clients need its keys: start it with --scheduler-file"
        say(f"scheduler at {started.address}: {way}")
    port, listens = started.dashboard_port, _dashboard_host(started)
    if not has_program or listens != host_of(started.address):
        way = f"{host}:{port} <login node>"
        if listens == LOOPBACK:
            way = f"{LOOPBACK}:{port} {host}"
        say(
            f"dashboard from your own machine: ssh -L {port}:{way}, then "
            f"http://localhost:{port}/status"
        )


def _dashboard_host(started: SchedulerStarted) -> str:
    return LOOPBACK if started.dashboard_host == LOOPBACK else host_of(started.address)


def loss_of(event: RankLost | SchedulerLost | WorkerFailed, link: Link) -> str:
    """Return what the run lost, why as far as it is known, and where to look."""
    match event:
        case SchedulerLost():
            return "the scheduler's process was killed: see whether the node ran out of memory"
        case RankLost(rank):
            return f"{link.name(rank)} is gone: it was killed or its node failed"
        case WorkerFailed(rank, _, text):
            return (
                f"a worker of {link.name(rank)} did not start: {text.rstrip('.')}. See its lines "
                f"above, and hpcdask doctor there"
            )


def host_of(address: str) -> str:
    """Return the host of an address with scheme and port."""
    return address.rpartition("://")[2].rpartition(":")[0]


class WarmupNotes:
    """Notes of the workers on their first exchanges, printed once all have come."""

    def __init__(self, wanted: WantedWorkers) -> None:
        self._wanted = wanted
        self._found: dict[str, list[LinkTest]] = {}
        self._told = False

    def note(self, message: dict[str, Any]) -> None:
        """Note a worker's; once all that are wanted have, say how it went."""
        self._found[message["name"]] = [LinkTest(**link) for link in message["links"]]
        if self._told or not self._wanted.names <= self._found.keys():
            return
        self._told = True
        links = [link for found in self._found.values() for link in found]
        if not links:
            return
        found = evaluate(links, on_device=self._wanted.on_device)
        say(f"warm in {seconds_since_start():.2f} s: {found.line}")
        for warning in found.warnings:
            say(f"warning: {warning}")
