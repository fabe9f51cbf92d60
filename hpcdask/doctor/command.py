"""``hpcdask doctor`` from its start to its exit code, alone or in each rank of a launch."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math

from hpcdask.bootstrap import ranks
from hpcdask.errors import UsageError
from hpcdask.security.ports import use
from hpcdask.spec.parsing import parse_port_range

from . import launch, links, nccl, nodes, report, stack
from .collect import Gathering
from .compare import differences
from .launch import Launch
from .report import Report


def run(
    *,
    as_json: bool,
    timeout: float,
    port_range: str | None = None,
    with_nccl: bool = False,
    gpus: bool = True,
) -> int:
    """Check this node, or under a launcher all nodes, and print one report.

    Must be called while the process has one thread. All ranks have to arrive within `timeout`
    seconds. All return the same exit code: 0 all is well, 1 with warnings, 2 with errors. NCCL is
    tried `with_nccl` only; without `gpus` nobody looks at GPUs.

    Raises UsageError if the timeout is no time or the range no range, HpcdaskError if the ranks
    cannot meet at all.
    """
    if not 0 < timeout < math.inf:
        raise UsageError(f"--timeout: {timeout:g} is not a time. Accepted: a number of seconds")
    use(parse_port_range(port_range, "--port-range"))
    rank = ranks.detect()
    first = rank is None or rank.local_index == 0
    readers = {name: group.read for name, group in nodes.GROUPS.items() if first or group.by_all}
    if not gpus:
        del readers["gpus"]
        readers["fabric"] = functools.partial(links.read, gpus=False)
    gathering = Gathering(readers)
    if rank is None or rank.size > 1:
        from . import meeting

        return meeting.take_part(
            rank, gathering, timeout, lambda heard: show(heard, as_json), with_nccl=with_nccl
        )
    heard = Launch(rank, timeout, hosts={0: rank.host}, reports={0: gathering.results()})
    if heard.reports[0].get("gpus", {}).get("gpus"):
        heard.reports[0]["stack"] = asyncio.run(stack.run())
    if with_nccl:
        heard.nccl = asyncio.run(
            nccl.measure(nccl.members(heard), lambda _, order: nccl.obey(order))
        )
    return show(heard, as_json)


def build(heard: Launch) -> Report:
    """The report of what was heard."""
    found = nodes.assemble(heard.reports, heard.hosts)
    workers = sum(nodes.workers(node) for node in found)
    launcher = heard.rank.launcher
    return Report(
        [(node, nodes.examine(node, launcher=launcher, workers=workers)) for node in found],
        [
            *(launch.check(heard) if heard.rank.size > 1 else []),
            *launch.check_transport(found),
            *nccl.check(heard.nccl),
        ],
        differences(found) if len(found) > 1 else [],
        heard.rank.size,
    )


def show(heard: Launch, as_json: bool) -> int:
    """Print the report, as far as that can be written, and return the exit code."""
    made = build(heard)
    with contextlib.suppress(OSError, ValueError):  # a full disk, a closed pipe
        if as_json:
            print(report.to_json(made), flush=True)
        else:
            report.print_text(made)
    return made.exit_code
