"""Agent of a rank, or of a job on one node, from the first look at the node to the workers' end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import dask.config
from distributed import Security

from hpcdask.bootstrap import orders, resources
from hpcdask.bootstrap.environment import own_process
from hpcdask.bootstrap.ranks import Rank
from hpcdask.bootstrap.stream import MessageStream
from hpcdask.bootstrap.supervisor import CONTEXT
from hpcdask.comm import fabric, transport
from hpcdask.comm.fabric import Fabric
from hpcdask.errors import DeviceError, HpcdaskError, MissingExtra, UsageError, root_cause
from hpcdask.gpu.devices import Gpu, visible_gpus
from hpcdask.gpu.driver import answer_deadline_s, cuda_extra, has_nvidia_driver
from hpcdask.logs import complain, set_log_level
from hpcdask.process import leave, owner_text
from hpcdask.security import ports
from hpcdask.security.credentials import check_configuration
from hpcdask.spec.records import Record
from hpcdask.spec.specs import WorkerSpec
from hpcdask.upstream import distributed as upstream

from .device_worker import RUN_IS_OVER
from .nanny import BoundNanny, make_nanny
from .placement import Inventory, WorkerPlacement
from .scratch import scratch_folder

#: Seconds that workers get to close, with their teardowns, and where something failed or a signal
#: ends the run.
CLOSE_DEADLINE_S, HURRIED_S = 10.0, 2.0


def run_agent(
    line: socket.socket,
    work: Callable[..., Awaitable[int]],
    rank: Rank,
    spec: WorkerSpec,
    *args: Any,
) -> NoReturn:
    """Do the work of an agent, and end this process with the exit code that it returns."""

    async def run() -> NoReturn:
        agent = HostAgent(await MessageStream.over(line), spec.configured(), rank)
        try:
            code = await work(agent, *args)
        except HpcdaskError as error:
            complain(error)
            code = error.exit_code
        except Exception:
            traceback.print_exc()
            code = 1
        agent.leave(code)

    upstream.run_in_loop(run())
    raise AssertionError("the agent leaves by itself")


class HostAgent:
    """Agent of a rank or a job here; ``parts`` are more processes, which the first nanny shows."""

    def __init__(self, line: MessageStream, spec: WorkerSpec, rank: Rank) -> None:
        self.rank, self.host = rank, rank.host
        self.owner = owner_text(own_process())
        self.spec = spec
        self.nannies: list[BoundNanny] = []
        self.parts: dict[str, int] = {}
        self.scratch = ""
        self._line = line
        self._probe: GpuProbe | None = None

    def tell(self, message: orders.Message) -> None:
        """Order something of the process that owns signals, program and janitor."""
        self._line.send(message)

    def clean(self, path: str) -> None:
        """Tell the janitor to remove a path when the rank is gone."""
        self.tell(orders.Clean(path))

    def listen(self, heard: Callable[[orders.Message], None]) -> None:
        """Pass on what the own process tells; once that is gone, end as the janitor does."""

        async def listen() -> None:
            async for message in self._line:
                heard(message)
            self.leave(1)

        self._listening = asyncio.create_task(listen())

    def leave(self, code: int) -> NoReturn:
        """End this process now, whatever its threads wait for; the rank's own process follows."""
        self.tell(orders.Leaving(code))
        leave(code)

    def prepare(self) -> None:
        """Make the scratch folder and start to look for GPUs. Raises UsageError on bad input."""
        check_configuration()
        ports.use(self.spec.port_range)
        set_log_level()
        upstream.preload_nothing()
        dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
        if self.spec.device != "cpu" and (has_nvidia_driver() or find_spec("pynvml")):
            self._probe = GpuProbe()
        self.scratch = scratch_folder(self.spec.local_directory, self.clean, self.owner)

    def look(self) -> Inventory:
        """Return what this node has for its workers."""
        found = ProbeResult()
        if self._probe is not None:
            found = self._probe.result()
        elif self.spec.protocol == "ucx" or self.spec.interface == transport.AUTO:
            found = ProbeResult(fabric=fabric.look(gpus=False))
        if found.gpus and not (find_spec("cuda") and find_spec("cuda.bindings")):
            raise MissingExtra("cuda-bindings", cuda_extra(), "a worker on a GPU")
        return Inventory(
            self.rank.index,
            self.host,
            self.rank.local_index,
            found.gpus,
            tuple(sorted(os.sched_getaffinity(0))),
            resources.job_memory(),
            resources.cpu_quota(),
            found.fabric,
        )

    async def start_workers(
        self,
        placements: Sequence[WorkerPlacement],
        scheduler: str,
        security: Security,
        failed: Callable[[str, str], None],
    ) -> None:
        """Start the workers; `failed` gets the name of each that does not start, and the reason."""

        async def start(one: WorkerPlacement) -> None:
            parts = {} if self.nannies else self.parts
            try:
                nanny = make_nanny(self.spec, one, parts, scheduler, security, self.scratch)
                self.nannies.append(nanny)
                await nanny
            except Exception as error:
                failed(one.name, root_cause(error))

        await asyncio.gather(*map(start, placements))

    async def close_workers(self, seconds: float = CLOSE_DEADLINE_S) -> None:
        """Close the workers, by force after some seconds."""
        set_log_level("CRITICAL")
        with contextlib.suppress(Exception):
            async with asyncio.timeout(seconds + 0.5):
                await asyncio.gather(
                    *(nanny.close(timeout=seconds, reason=RUN_IS_OVER) for nanny in self.nannies),
                    return_exceptions=True,
                )


@dataclass(frozen=True)
class ProbeResult(Record):
    """GPUs that this process may use, and what joins them; or the probe's error."""

    gpus: tuple[Gpu, ...] = ()
    fabric: Fabric = field(default_factory=Fabric)
    error: str = ""


class GpuProbe:
    """Probe that runs while its owner goes on."""

    def __init__(self) -> None:
        self._answer, theirs = CONTEXT.Pipe(duplex=False)
        self._process = CONTEXT.Process(target=_answer, args=(theirs,), name="gpu-probe")
        self._process.start()
        theirs.close()

    def result(self) -> ProbeResult:
        """Return what the probe saw. Raises DeviceError if it failed or does not answer in time."""
        advice = "see whether nvidia-smi works on this node, and leave the node out if it does not"
        try:
            if not self._answer.poll(seconds := answer_deadline_s()):
                text = f"the NVIDIA driver did not answer within {seconds:g} s"
                raise DeviceError(f"{text}: {advice}")
            found = ProbeResult.from_json(json.loads(self._answer.recv_bytes()))
        except EOFError:
            raise DeviceError(f"the process that looks for GPUs has died: {advice}") from None
        finally:
            self._process.kill()
            self._process.join(0.5)  # one that hangs in the driver may die much later
            self._answer.close()
        if found.error:
            raise DeviceError(found.error)
        return found


def _answer(pipe: Connection) -> None:
    try:
        gpus = visible_gpus()
        own = {gpu.uuid for gpu in gpus}
        found = ProbeResult(tuple(gpus), fabric.look(gpus=bool(gpus), own=own))
    except UsageError as error:
        found = ProbeResult(error=str(error))
    except Exception as error:  # NVML's, of a GPU that is broken
        found = ProbeResult(error=f"the NVIDIA driver fails: {type(error).__name__}: {error}")
    pipe.send_bytes(json.dumps(found.to_json()).encode())
