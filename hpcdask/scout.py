"""A process that finds GPUs and what joins them, while the rank imports distributed."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

from . import fabric
from .devices import Gpu, has_nvidia_driver, visible_gpus
from .errors import DeviceError, UsageError
from .fabric import Fabric

#: Seconds that the driver gets to name the GPUs.
SCOUT_DEADLINE_S = 30.0


class Sighting(NamedTuple):
    """What the scout saw."""

    gpus: list[Gpu]
    fabric: Fabric


class Scout:
    """Asks NVML, which takes 0.2 s."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    @classmethod
    def start(cls, in_child: Callable[[], None]) -> Scout | None:
        """Fork the scout, where there is a driver to ask.

        Parameters
        ----------
        in_child
            Called in the scout first, to close what belongs to the rank.
        """
        if not has_nvidia_driver() and find_spec("pynvml") is None:
            return None
        read_end, write_end = os.pipe()
        if os.fork() == 0:
            try:
                in_child()
                os.close(read_end)
                try:
                    found: dict[str, Any] = {
                        "gpus": [dataclasses.asdict(gpu) for gpu in visible_gpus()],
                        "fabric": dataclasses.asdict(fabric.look()),
                    }
                except UsageError as error:
                    found = {"error": str(error)}
                with open(write_end, "w") as stream:
                    json.dump(found, stream)
            finally:
                os._exit(0)
        os.close(write_end)
        return cls(read_end)

    def report(self) -> Sighting:
        """What it saw. Call it once.

        Raises
        ------
        DeviceError
            What it raised.
        """
        deadline, text = time.monotonic() + SCOUT_DEADLINE_S, b""
        while chunk := self._read_until(deadline):
            text += chunk
        os.close(self._pipe)
        found = json.loads(text or '{"error": "the process that asks NVML for GPUs has died"}')
        if "error" in found:
            raise DeviceError(found["error"])
        return Sighting(list(map(Gpu.from_json, found["gpus"])), Fabric.from_json(found["fabric"]))

    def _read_until(self, deadline: float) -> bytes:
        if not select.select([self._pipe], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise DeviceError(
                f"the NVIDIA driver did not answer within {SCOUT_DEADLINE_S:g} s: see whether "
                f"nvidia-smi works on this node, and leave the node out if it does not"
            )
        return os.read(self._pipe, 65536)
