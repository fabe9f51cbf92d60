"""Process that asks the NVIDIA driver for GPUs: the driver of a broken GPU may never answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.util import find_spec
from multiprocessing.connection import Connection

from hpcdask.bootstrap.supervisor import CONTEXT
from hpcdask.comm import fabric
from hpcdask.comm.fabric import Fabric
from hpcdask.errors import DeviceError, UsageError
from hpcdask.gpu.devices import Gpu, visible_gpus
from hpcdask.gpu.driver import answer_deadline_s, has_nvidia_driver
from hpcdask.spec.records import Record


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
        self._process = CONTEXT.Process(
            target=_answer, args=(theirs,), name="gpu-probe", daemon=True
        )
        self._process.start()
        theirs.close()

    @classmethod
    def start(cls) -> GpuProbe | None:
        """Start the probe where there is a driver to ask."""
        return cls() if has_nvidia_driver() or find_spec("pynvml") else None

    def result(self) -> ProbeResult:
        """Return what the probe saw. Raises DeviceError if it failed or does not answer in time."""
        try:
            if not self._answer.poll(deadline_s := answer_deadline_s()):
                raise DeviceError(
                    f"the NVIDIA driver did not answer within {deadline_s:g} s: see whether "
                    f"nvidia-smi works on this node, and leave the node out if it does not"
                )
            found = ProbeResult.from_json(json.loads(self._answer.recv_bytes()))
        except EOFError:
            raise DeviceError(
                "the process that looks for GPUs has died: see whether nvidia-smi works on this "
                "node, and leave the node out if it does not"
            ) from None
        finally:
            self._process.kill()
            self._process.join(0.5)  # one that hangs in the driver may die much later
            self._answer.close()
        if found.error:
            raise DeviceError(found.error)
        return found


def _answer(pipe: Connection) -> None:
    pipe.send_bytes(json.dumps(_look().to_json()).encode())


def _look() -> ProbeResult:
    try:
        gpus = visible_gpus()
        own = {gpu.uuid for gpu in gpus}
        return ProbeResult(tuple(gpus), fabric.look(gpus=bool(gpus), own=own))
    except UsageError as error:
        return ProbeResult(error=str(error))
    except Exception as error:  # NVML's, of a GPU that is broken
        return ProbeResult(error=f"the NVIDIA driver fails: {type(error).__name__}: {error}")
