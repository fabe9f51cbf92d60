"""Facts from the driver's files, without NVML."""

from __future__ import annotations

import contextlib
import glob
import os
import re
from collections.abc import Collection

#: NVIDIA's library in Windows' Linux.
WINDOWS_NVML = "/usr/lib/wsl/lib/libnvidia-ml.so.1"
#: CUDA versions for which there is an extra; drivers run older ones, too.
OLDEST_CUDA, NEWEST_CUDA = 12, 13
#: The first driver for CUDA 13, and the GPUs that it still drives and CUDA 13 does not know.
DRIVER_OF_13 = 580
OLD_GPUS = re.compile(r"\b(G?V100|G?P100|P40|TITAN V)\b")
#: The packages of a CUDA version by which an environment is known.
OF_CUDA = ("cupy-cuda{}x", "rmm-cu{}", "distributed-ucxx-cu{}")
#: Seconds that the driver gets to name its GPUs, and for each of many: without persistence mode it
#: makes each ready anew, which takes some seconds.
ANSWER_S, ANSWER_EACH_S = 30.0, 10.0


def cuda_extra(root: str = "/") -> str:
    """Return the extra of hpcdask that brings CUDA packages for this machine.

    By the files of the driver, not NVML; without a driver, the newest. ``root`` stands for ``/``,
    and ends in one.
    """
    from importlib.metadata import PackageNotFoundError, version

    installed = []
    for name in (form.format(cuda) for cuda in (OLDEST_CUDA, NEWEST_CUDA) for form in OF_CUDA):
        with contextlib.suppress(PackageNotFoundError):
            version(name)
            installed.append(name)
    module = re.search(r"Kernel Module.*?\s(\d+)\.", read(f"{root}proc/driver/nvidia/version"))
    is_old = any(OLD_GPUS.search(gpu.get("Model", "")) for gpu in _information(root))
    if is_old or (module and int(module[1]) < DRIVER_OF_13):
        return extra_for(OLDEST_CUDA, installed)
    return extra_for(NEWEST_CUDA, installed)


def extra_for(newest: int, packages: Collection[str]) -> str:
    """Return the extra of hpcdask that brings CUDA packages for the newest CUDA that runs here.

    Packages of two CUDA versions do not load together, so it depends on what is installed.
    """

    def has(cuda: int) -> bool:
        return any(form.format(cuda) in packages for form in OF_CUDA)

    settled = OLDEST_CUDA if has(OLDEST_CUDA) and not has(NEWEST_CUDA) else NEWEST_CUDA
    return f"cuda{min(settled, newest)}"


def _information(root: str) -> list[dict[str, str]]:
    """Return the driver's files about its GPUs, by their PCI addresses."""
    paths = sorted(glob.glob(f"{glob.escape(root)}proc/driver/nvidia/gpus/*/information"))
    return [dict(re.findall(r"^([^:\n]+):[ \t]*(.*?)\s*$", read(one), re.M)) for one in paths]


def read(path: str) -> str:
    """Return a small file's text without white space around it; empty where it is unreadable."""
    try:
        with open(path) as file:
            return file.read().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def has_nvidia_driver() -> bool:
    """Return whether this machine has NVIDIA device files, by looking at /dev only."""
    # In Windows' Linux, /dev/dxg is there for every maker's GPU, the library for NVIDIA's
    windows = os.path.exists("/dev/dxg") and os.path.exists(WINDOWS_NVML)
    return windows or bool(glob.glob("/dev/nvidia[0-9]*"))


def hidden_gpus(root: str = "/") -> int:
    """Return how many of the node's GPUs a cgroup or a container keeps from this process.

    Between jobs that are confined like this, GPU memory cannot be mapped, so ucx cannot use NVLink.
    GPUs that the driver was told to leave out do not count.
    """
    minors = [
        gpu["Device Minor"]
        for gpu in _information(root)
        if gpu.get("GPU Excluded") != "Yes" and gpu.get("Device Minor")
    ]
    # the kernel asks the device cgroup here too
    return sum(not os.access(f"{root}dev/nvidia{one}", os.R_OK | os.W_OK) for one in minors)


def answer_deadline_s() -> float:
    """Return the seconds in which the driver of this node should have named all its GPUs."""
    return max(ANSWER_S, ANSWER_EACH_S * len(_information("/")))
