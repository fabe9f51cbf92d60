"""The files by which a run is found: the scheduler file that was asked for, and one on its node.

Both name the nannies of its workers, which `hpcdask stacks` asks past a scheduler that is stuck.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Mapping
from typing import Literal

from hpcdask.bootstrap.orders import Clean
from hpcdask.client import scheduler_file
from hpcdask.errors import SchedulerFileError
from hpcdask.jobs.runs import RunNote
from hpcdask.node.host_agent import HostAgent
from hpcdask.queues.environment import job_id
from hpcdask.security import private
from hpcdask.security.credentials import Credentials

#: Seconds between two writings, and for the last one to end.
PAUSE_S, LAST_S = 2.0, 2.0


class RunFiles:
    """The files of a run.

    `asked` is the file of ``--scheduler-file``, `program` the path of what runs.
    """

    def __init__(self, agent: HostAgent, asked: str | None, program: str) -> None:
        self._agent = agent
        self._script, self._program = program, os.path.basename(program)
        self._wanted = os.path.abspath(asked) if asked else ""
        self._asked = ""
        self._listed = ""
        self._paths: list[str] = []
        self._address = ""
        self._doors: dict[str, str] = {}
        self._over = asyncio.Event()
        self._noting: asyncio.Task[None] | None = None

    def write(
        self, address: str, credentials: Credentials, doors: Mapping[str, str], *, gpus: bool
    ) -> None:
        """Write both; `doors` are the nannies' addresses by the names of their workers."""
        self._address, self._doors = address, dict(doors)
        own = os.path.join(self._agent.scratch, "run.json")
        self._paths = [own]
        if self._wanted:
            self._asked = self._wanted
            self._clean("now", self._asked, f"{self._asked}.keys")
            self._paths.append(self._asked)
        for path in self._paths:
            scheduler_file.write(
                path,
                address,
                credentials,
                job=job_id(),
                gpus=gpus,
                program=self._program,
                script=self._script,
                started=time.time(),
                **self._facts(),
            )
        with contextlib.suppress(OSError):  # then it is found by its file only
            folder = private.node_folder(scheduler_file.RUNS)
            _remove_old_links(folder)
            link = os.path.join(folder, str(os.getpid()))
            self._clean("now", link)
            private.remove(link)  # of a process that had this id
            os.symlink(own, link)
        if self._asked:
            note = RunNote.of_this(self._asked, address, self._program)
            with contextlib.suppress(OSError):  # then it is not listed
                note.write()
                self._listed = str(note.path)

    def _clean(self, when: Literal["now", "never"], *paths: str) -> None:
        for path in paths:
            self._agent.tell(Clean(path, when))

    def _facts(self) -> dict[str, object]:
        return {"doors": self._doors, "parts": self._agent.parts}

    def note(self, doors: Mapping[str, str]) -> None:
        """Note the doors of workers that came later, soon."""
        if self._paths and doors != self._doors:
            self._doors = dict(doors)
            if self._noting is None or self._noting.done():
                self._noting = asyncio.create_task(self._note())

    async def _note(self) -> None:
        written = None
        while written is not self._doors and not self._over.is_set():
            written = self._doors
            for path in self._paths:
                with contextlib.suppress(OSError, SchedulerFileError):  # somebody has removed it
                    await asyncio.to_thread(scheduler_file.note, path, **self._facts())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_S):
                    await self._over.wait()

    def unlist(self) -> None:
        """The run ends, and says so: `hpcdask list` is not to take it for one that was killed."""
        if self._listed:
            private.remove(self._listed)

    async def remove(self) -> None:
        """Remove what lies outside of the rank's folder: the next cluster may write there now."""
        self._over.set()
        if self._noting is not None:
            await asyncio.wait([self._noting], timeout=LAST_S)
        if self._asked:
            scheduler_file.remove(self._asked, self._address)
            self._clean("never", self._asked, f"{self._asked}.keys")


def _remove_old_links(folder: str) -> None:
    """Remove the links of runs that were killed together with their janitors."""
    for pid in os.listdir(folder):
        link = os.path.join(folder, pid)
        if not os.path.exists(link) and not os.path.exists(f"/proc/{pid}"):
            private.remove(link)
