"""``hpcdask doctor`` from its start to its exit code, alone or in each rank of a launch."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import signal
import sys

from hpcdask.bootstrap import ranks
from hpcdask.comm import fabric
from hpcdask.errors import HpcdaskError, UsageError
from hpcdask.gpu.driver import answer_deadline_s
from hpcdask.logs import complain
from hpcdask.process import leave
from hpcdask.runner import mpi
from hpcdask.runner.rendezvous import Rendezvous
from hpcdask.security.ports import use
from hpcdask.spec.parsing import parse_port_range

from . import launch, nccl, nodes, report
from .collect import Gathering
from .compare import differences
from .launch import Launch
from .meeting import Leader, Member, follow
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
        readers["fabric"] = functools.partial(fabric.look, gpus=False)
    gathering = Gathering(readers, dict.fromkeys(("gpus", "fabric"), answer_deadline_s()))
    code = _meet(rank, gathering, timeout, as_json=as_json, with_nccl=with_nccl)
    if gathering.hangs:
        leave(code)
    return code


def _meet(
    rank: ranks.Rank | None, gathering: Gathering, timeout: float, *, as_json: bool, with_nccl: bool
) -> int:
    """Lead the other ranks, if there are any, or follow rank 0; return the exit code."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # through `finally`
    member = Member(gathering)
    try:
        meeting = None
        if rank is None or rank.size > 1:
            rank = mpi.find_rank(rank, timeout)
            meeting = Rendezvous.of(rank)
            if rank.index:
                return asyncio.run(follow(rank, member, meeting, timeout))
        try:
            return asyncio.run(_lead(rank, member, meeting, timeout, as_json, with_nccl))
        finally:
            if meeting:
                meeting.close()
    except HpcdaskError as error:
        if rank is None or rank.index == 0:
            raise
        complain(error)
        return 0  # mpirun would kill rank 0 before it has reported


async def _lead(
    rank: ranks.Rank,
    member: Member,
    meeting: Rendezvous | None,
    timeout: float,
    as_json: bool,
    with_nccl: bool,
) -> int:
    leader = Leader(Launch(rank, timeout), member)
    if meeting is not None and rank.size > 1:
        await leader.open(meeting)
    await leader.hear(with_nccl=with_nccl)
    code = show(leader.launch, as_json)
    await leader.end(code)
    return code


def build(heard: Launch) -> Report:
    """Return the report of what was heard."""
    found = nodes.assemble(heard.reports, heard.hosts, heard.rank.launcher)
    return Report(
        [(node, nodes.examine(node)) for node in found],
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
