"""One workload, and what is done with each: announce it, warm up, time it, check it, record it.

What is timed is what a user waits for: from the call that computes a graph, already built, to the
result in the client, optimisation, scheduling and transfer included. Each repeat has a graph of
its own with other random numbers, so that nothing is remembered from the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hpcdask.bench.cluster import Cluster
from hpcdask.bench.limits import Work
from hpcdask.bench.records import Case, announce, record
from hpcdask.bench.timing import Timed, hold, measure
from hpcdask.workloads import Check


@dataclass(frozen=True)
class Workload:
    """A computation with a known answer, for a cluster.

    ``build`` makes the collections of a repeat from the input, which may be ``held`` by the
    workers, and its number; ``finish`` the result and the checks. ``warm_up`` makes less than a
    whole run.
    """

    case: Case
    build: Callable[[Any, int], Sequence[Any]]
    finish: Callable[[Any, Timed], tuple[dict[str, Any], list[Check]]]
    input: Any = None
    held: bool = False
    warm_up: Callable[[int], Sequence[Any]] | None = None
    work: Work | None = None
    published: Sequence[dict[str, Any]] = ()


def run(workload: Workload, cluster: Cluster, repeats: int, timeline: bool) -> dict[str, Any]:
    """Return the record that the command prints as JSON; a timeline takes one more run."""
    x, client = workload.input, cluster.client
    # input errors come before the first line of output
    if workload.warm_up is None:
        workload.build(x, 0)
    else:
        workload.warm_up(0)
    announce(workload.case, cluster)
    if workload.held:
        x = hold(client, x)
    if workload.warm_up is not None:
        measure(client, workload.warm_up, 0, n_warmup=1)
    n_warmup = 1 if workload.warm_up is None else 0
    timed = measure(
        client, lambda i: workload.build(x, i), repeats, n_warmup=n_warmup, timeline=timeline
    )
    result, checks = workload.finish(x, timed)
    how: dict[str, Any] = {"work": workload.work, "published": workload.published}
    return record(workload.case, cluster, timed, result, checks, **how)
