"""Rank 0's hold on the user's program, and the files by which a run is found."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from hpcdask.bootstrap.orders import ProgramEnded, StartProgram
from hpcdask.bootstrap.stream import MessageStream
from hpcdask.client import scheduler_file
from hpcdask.client.connect import program_variables
from hpcdask.errors import SchedulerFileError
from hpcdask.jobs import runs
from hpcdask.node.host_agent import HostAgent
from hpcdask.process import owner_text
from hpcdask.queues.registry import job_id, system_of_job
from hpcdask.security import private
from hpcdask.security.credentials import Credentials

from .link import Events


class UserProgram:
    """The program of a run: a child of the rank's own process, the one that started it, or none.

    `line` leads to the program that started this rank: its end is the program's.
    """

    def __init__(
        self, agent: HostAgent, events: Events, own: bool, line: socket.socket | None
    ) -> None:
        self.waits = own  # starts before the cluster is ready
        self.attached = line is not None
        self.exists = own or self.attached
        self.runs = False
        self._agent, self._events, self._line = agent, events, line
        self._cluster: dict[str, Any] = {}

    def start(self, address: str, file: str, *, on_gpus: bool) -> None:
        """Start the program while the workers come up; its first ``Client()`` waits for `ready`."""
        self._cluster = {"address": address, "file": file, "on_gpus": on_gpus}
        if self.waits:
            self._agent.tell(StartProgram(program_variables(**self._cluster)))

    def ready(self) -> None:
        """Tell the program that the cluster is ready."""
        if self._line is not None:
            self._attending = asyncio.create_task(self._attend(self._line))
        elif self.waits:
            scheduler_file.note(self._cluster["file"], ready=True)

    async def _attend(self, line: socket.socket) -> None:
        channel = await MessageStream.over(line)
        channel.send(**self._cluster)
        while await channel.receive() is not None:
            pass
        self._events.put_nowait(ProgramEnded(0))


class RunFiles:
    """Files of a run: `own`, and `asked`, the one of ``--scheduler-file`` or ""."""

    def __init__(self, agent: HostAgent, asked: str | None, script: str) -> None:
        self.own = os.path.join(agent.scratch, "scheduler.json")
        self.asked = os.path.abspath(asked) if asked else ""
        self._agent = agent
        self._facts = {"program": os.path.basename(script), "script": script}
        self._facts |= {"owner": owner_text(), "queue": system_of_job() or ""}
        self._address = ""
        self._nannies: dict[str, str] = {}

    def write(self, path: str, address: str, credentials: Credentials, **facts: Any) -> None:
        """Write `own`, by which the program waits until the run is ready, or `asked`."""
        if path == self.asked:
            self._address = address
            self._agent.clean(path)
            self._agent.clean(f"{path}.keys")
        facts |= {**self._facts, "started": time.time()}
        scheduler_file.write(path, address, credentials, job=job_id(), **facts)

    def publish(self, nannies: Mapping[str, str]) -> None:
        """List the run on this node and for `hpcdask list`."""
        if self.asked:
            self._agent.clean(str(runs.link(self.asked)))
            with contextlib.suppress(OSError):  # then it is not listed
                runs.enlist(self.asked)
        with contextlib.suppress(OSError):  # then it is found by its file only
            link = os.path.join(private.node_folder(scheduler_file.RUNS), str(os.getpid()))
            self._agent.clean(link)
            private.remove(link)  # of a process that had this id
            os.symlink(self.own, link)
        self.note(nannies)

    def note(self, nannies: Mapping[str, str]) -> None:
        """Note the nannies of all workers by the workers' names."""
        for path in filter(None, (self.own, self.asked)) if nannies != self._nannies else ():
            with contextlib.suppress(OSError, SchedulerFileError):  # somebody has removed it
                scheduler_file.note(path, doors=nannies, parts=self._agent.parts)
        self._nannies = dict(nannies)

    def remove(self) -> None:
        """Remove what lies outside of the rank's folder."""
        if self._address:
            scheduler_file.remove(self.asked, self._address)
