"""A process that finds GPUs and what joins them, while the rank imports distributed.

Where the rank will have one worker, and which GPU it gets is clear, that process goes on to become
the worker (`hpcdask.node.prestart`). Else it holds the driver open on the GPUs that the workers
will probably take, until they are there: a process that starts CUDA on a GPU where nobody else has
is 0.2 s slower, and more where several start at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import json
import os
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import NamedTuple

from hpcdask.bootstrap import ranks
from hpcdask.comm import fabric
from hpcdask.comm.fabric import Fabric
from hpcdask.errors import DeviceError, UsageError
from hpcdask.gpu.context import start_cuda
from hpcdask.gpu.devices import Gpu, foreseen_gpus, look_at_gpus
from hpcdask.gpu.driver import driver_files, has_nvidia_driver
from hpcdask.process import mark
from hpcdask.spec import kinds
from hpcdask.spec.records import Record

#: Seconds that the driver gets to name the GPUs.
PROBE_DEADLINE_S = 30.0
#: Seconds after which it lets the driver go, where the rank gets no worker by then.
HOLD_S = 60.0
#: Seconds that the probe gets to be gone.
DISMISSAL_S = 0.5


class EarlyOptions(NamedTuple):
    """Guess at a command line that is not read yet; a wrong guess costs time only.

    ``in_run``: the ranks of a run meet, those of a job do not. ``elsewhere``: the rank's worker has
    no GPU, or not the one that its number tells. ``kinds`` are those of the ranks of a node.
    """

    in_run: bool
    elsewhere: bool = False
    tcp: bool = False
    oversubscribe: bool = False
    kinds: Sequence[str] = ()

    @classmethod
    def read(cls, arguments: Sequence[str], *, in_run: bool) -> EarlyOptions:
        """Look at all words, the program's too."""
        words = {word for argument in arguments for word in argument.split("=")}
        elsewhere = "cpu" in words
        groups = kinds.kinds(" ".join(words)) if "--groups" in words else ()
        return cls(in_run, elsewhere, "tcp" in words, "--oversubscribe" in words, groups)

    def among_gpus(self, rank: ranks.Rank | None) -> ranks.Rank | None:
        """The rank with its number among those of its node on GPUs; None if it is on the CPU."""
        if rank is None or rank.local_size != len(self.kinds):
            return rank
        if self.kinds[rank.local_index] == "cpu":
            return None
        before, size = self.kinds[: rank.local_index].count("gpu"), self.kinds.count("gpu")
        return dataclasses.replace(rank, local_index=before, local_size=size)


#: Makes a process ready to be a worker, see `hpcdask.node.prestart.prestart`.
Prestart = Callable[[Callable[[], str | None], socket.socket, EarlyOptions, str | None], None]


@dataclass(frozen=True)
class ProbeResult(Record):
    """GPUs that the rank may use, and what joins them; or the probe's error.

    ``shown`` are those that NVML was asked about; None where the first rank of the node does that.
    ``prestarts`` is the GPU on which the probe is to be the worker.
    """

    gpus: tuple[Gpu, ...] = ()
    shown: tuple[Gpu, ...] | None = ()
    fabric: Fabric = field(default_factory=Fabric)
    error: str = ""
    prestarts: str | None = None


class GpuProbe:
    """Looks for GPUs, and becomes the worker or holds the driver open.

    It writes to the pipe, and takes the order to be the worker from the line. ``uuid`` is the GPU
    on which it is ready to be the worker, or soon will be; None if it does not. Known after
    `report`.
    """

    def __init__(self, pid: int, pipe: int, line: socket.socket) -> None:
        self._pid = pid
        self._pipe = pipe
        self._line = line
        self._over = False
        self.uuid: str | None = None

    @classmethod
    def start(
        cls, in_child: Callable[[], None], early: EarlyOptions, prestart: Prestart | None = None
    ) -> GpuProbe | None:
        """Fork the probe, where there is a driver to ask.

        ``in_child`` is called in it first, to close what belongs to the rank; ``prestart`` makes it
        a worker, where it may become one.
        """
        if not has_nvidia_driver() and find_spec("pynvml") is None:
            return None
        read_end, write_end = os.pipe()
        line, theirs = socket.socketpair()
        pid = os.fork()
        if pid == 0:
            try:
                in_child()
                os.close(read_end)
                line.close()
                _serve(write_end, theirs, early, prestart)
            except Exception:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(0)
        os.close(write_end)
        theirs.close()
        return cls(pid, read_end, line)

    def release_in_child(self) -> None:
        """Drop what belongs to the rank, in a process that was forked from it."""
        os.close(self._pipe)
        self._line.close()

    def report(self) -> ProbeResult:
        """Return what the probe saw, or raise its error. Call it once, and `dismiss` later."""
        deadline, text = time.monotonic() + PROBE_DEADLINE_S, b""
        while chunk := self._read_until(deadline):
            text += chunk
        if not text:
            raise DeviceError(
                "the process that looks for GPUs has died: see whether nvidia-smi works on this "
                "node, and leave the node out if it does not"
            )
        found = ProbeResult.from_json(json.loads(text))
        if found.error:
            raise DeviceError(found.error)
        self.uuid = found.prestarts
        return found

    def give(self) -> tuple[int, socket.socket]:
        """The process that is to be the worker, and the line to it: it is no probe any more."""
        self._over = True
        os.close(self._pipe)
        return self._pid, self._line

    def dismiss(self) -> None:
        """End it, where it is no longer of use. One that hangs in the driver may die much later."""
        if self._over:
            return
        self._over = True
        os.close(self._pipe)
        self._line.close()
        os.kill(self._pid, signal.SIGKILL)
        deadline = time.monotonic() + DISMISSAL_S
        while not os.waitpid(self._pid, os.WNOHANG)[0] and time.monotonic() < deadline:
            time.sleep(0.001)

    def _read_until(self, deadline: float) -> bytes:
        if not select.select([self._pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise DeviceError(
                f"the NVIDIA driver did not answer within {PROBE_DEADLINE_S:g} s: see whether "
                f"nvidia-smi works on this node, and leave the node out if it does not"
            )
        return os.read(self._pipe, 65536)


def _serve(pipe: int, line: socket.socket, early: EarlyOptions, prestart: Prestart | None) -> None:
    """In the probe: look, tell, and be of use until the workers are there."""
    rank, environ = early.among_gpus(ranks.detect()), dict(os.environ)
    may = prestart if has_nvidia_driver() and _may_prestart(rank, early) else None
    files = driver_files() if may else []
    gpus = foreseen_gpus(files, environ)
    foreseen = _choose(rank, [gpu.uuid for gpu in gpus], early)
    shared = early.in_run and rank is not None and rank.local_size > 1
    first = rank is not None and rank.local_index == 0
    leaves = shared and not first and foreseen is not None and len(gpus) == len(files) > 1
    held: list[str] = []

    def look() -> str | None:
        # NVML takes the driver's locks, as CUDA does: N ranks that ask for N GPUs each keep their
        # contexts waiting. The ranks of a run meet, those of a job do not.
        found = _foresee(environ, gpus) if leaves else _ask(environ, every=shared and first)
        mark("GPUs found")
        uuids = [gpu.uuid for gpu in found.gpus]
        uuid = _choose(rank, uuids, early) if may else None
        wrong = foreseen is not None and uuid != foreseen
        with open(pipe, "w") as stream:
            told = dataclasses.replace(found, prestarts=None if wrong else uuid)
            stream.write(json.dumps(told.to_json()))
        if wrong:
            os._exit(0)  # and let the other GPU go
        if uuid is None:
            held.extend(_hold_open(rank, uuids))
        return uuid

    if may:
        may(look, line, early, foreseen)
    else:
        look()
    if held:
        time.sleep(HOLD_S)


def _ask(environ: Mapping[str, str], *, every: bool) -> ProbeResult:
    """Return the GPUs, or the error that keeps from seeing them.

    ``every``: ask about the node's other GPUs too, for the ranks that leave it to this one.
    """
    try:
        with _one_start():
            gpus, shown = look_at_gpus(environ, every=every)
            own = {gpu.uuid for gpu in shown}
            seen = fabric.look(environ=environ, gpus=bool(gpus), own=own)
        return ProbeResult(tuple(gpus), tuple(shown), seen)
    except UsageError as error:
        return ProbeResult(error=str(error))
    except Exception as error:  # NVML's, of a GPU that is broken
        return ProbeResult(error=f"the NVIDIA driver fails: {type(error).__name__}: {error}")


def _foresee(environ: Mapping[str, str], gpus: Sequence[Gpu]) -> ProbeResult:
    """The same without NVML, for `hpcdask.runner.assignment.fill_from_first_rank`."""
    try:
        seen = fabric.look(environ=environ, gpus=False)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        return ProbeResult(
            error=f"{what}: mend /sys and /proc on this node, or leave it out of the run"
        )
    seen = dataclasses.replace(seen, gpus=tuple(gpu.uuid for gpu in gpus))
    return ProbeResult(tuple(gpus), None, seen)


@contextlib.contextmanager
def _one_start() -> Iterator[None]:
    """Start NVML once for all that ask: it counts, and only the first start takes its time."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(Exception):  # whoever asks it says what is wrong
            import pynvml

            pynvml.nvmlInit()
            stack.callback(pynvml.nvmlShutdown)
        yield


def _may_prestart(rank: ranks.Rank | None, early: EarlyOptions) -> bool:
    """Return whether this rank may have one worker, and a core more for its imports."""
    if rank is None or early.elsewhere:
        return False
    if rank.local_size == 1 and _count_visible() != 1:
        return False  # a worker for each, or one that the job chooses
    sharing = 1 if rank.launcher == "srun" else rank.local_size  # mpirun's share what it has
    return len(os.sched_getaffinity(0)) >= 2 * sharing


def has_peers(rank: ranks.Rank | None) -> bool:
    """Return whether there may be other workers on GPUs in the run of this rank."""
    return rank is None or rank.size > 1 or _count_visible() != 1


def _count_visible() -> int:
    """GPUs that this process may use, as far as that is seen without asking NVML."""
    if (wanted := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len(list(filter(None, wanted.split(","))))
    return len(glob.glob("/dev/nvidia[0-9]*"))


def _choose(rank: ranks.Rank | None, uuids: Sequence[str], early: EarlyOptions) -> str | None:
    """The GPU that the rank's only worker will get, where that is as good as certain.

    A context on the GPU of another rank would keep that one out, in exclusive mode.
    """
    probable = _probable(rank, uuids)
    own_or_all = rank and (len(uuids) == 1 or len(uuids) >= rank.local_size)
    certain = own_or_all or early.oversubscribe
    return probable[0] if certain and len(probable) == 1 else None


def _probable(rank: ranks.Rank | None, uuids: Sequence[str]) -> Sequence[str]:
    if rank is None or not uuids:
        return []
    return [uuids[rank.local_index % len(uuids)]] if rank.local_size > 1 else uuids


def _hold_open(rank: ranks.Rank | None, uuids: Sequence[str]) -> Sequence[str]:
    """Start CUDA on the GPUs that the rank's workers will probably take, without a context."""
    if probable := _probable(rank, uuids):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(probable)
        return probable if start_cuda() else []
    return []
