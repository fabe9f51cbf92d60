"""A stand-in for NVML's Python package, for tests on machines without a GPU.

Put this folder first on PYTHONPATH and describe the machine in FAKE_NVML, as JSON: a list of
GPUs, in NVML's order, with ``uuid`` and, where it matters, ``name``, ``memory`` (bytes), ``bus``
(PCI bus id), ``cores`` (near CPU cores; null: not supported) and ``mig`` (null: not capable;
empty: disabled; else one entry per slot: a slice with ``uuid``, ``name`` and ``memory``, or null
where the slot is free), ``forbidden`` (true: a cgroup keeps it from this process) and ``nvlink``
(UUIDs of the GPUs that NVLink joins it to; null, or left out: not told). Without FAKE_NVML there is
no driver. Like the real one it refuses calls before nvmlInit, and counts the starts in `starts`.
"""

import json
import os
from types import SimpleNamespace

NVML_DEVICE_MIG_DISABLE = 0
NVML_DEVICE_MIG_ENABLE = 1
NVML_P2P_CAPS_INDEX_NVLINK = 2
NVML_P2P_STATUS_OK = 0
NVML_P2P_STATUS_NOT_SUPPORTED = 5
NVML_P2P_STATUS_UNKNOWN = 6


class NVMLError(Exception):
    """Base of NVML's errors."""


class NVMLError_Uninitialized(NVMLError):
    """Called before nvmlInit or after nvmlShutdown."""


class NVMLError_NoPermission(NVMLError):
    """A cgroup keeps the device from this process."""


class NVMLError_LibraryNotFound(NVMLError):
    """There is no driver."""


class NVMLError_NotSupported(NVMLError):
    """The device cannot do that."""


class NVMLError_NotFound(NVMLError):
    """There is no such slice."""


class NVMLError_InvalidArgument(NVMLError):
    """There is no such index."""


starts = 0  # of NVML from nothing; those while it runs take no time
_inits = 0


def _gpus():
    if not _inits:
        raise NVMLError_Uninitialized("Uninitialized")
    return json.loads(os.environ["FAKE_NVML"])


def nvmlInit():
    global _inits, starts
    if "FAKE_NVML" not in os.environ:
        raise NVMLError_LibraryNotFound("NVML Shared Library Not Found")
    starts += not _inits
    _inits += 1


def nvmlShutdown():
    global _inits
    _gpus()
    _inits -= 1


def nvmlDeviceGetCount():
    return len(_gpus())


def nvmlDeviceGetHandleByIndex(index):
    gpus = _gpus()
    if not 0 <= index < len(gpus):
        raise NVMLError_InvalidArgument("Invalid Argument")
    if gpus[index].get("forbidden"):
        raise NVMLError_NoPermission("Insufficient Permissions")
    if gpus[index].get("lost"):
        raise NVMLError("GPU is lost")
    return {"bus": f"00000000:{index + 1:02X}:00.0", **gpus[index]}


def nvmlDeviceGetPciInfo(handle):
    return SimpleNamespace(busId=handle["bus"])


def nvmlDeviceGetName(handle):
    return handle.get("name", "Fake GPU")


def nvmlDeviceGetUUID(handle):
    return handle["uuid"]


def nvmlDeviceGetMemoryInfo(handle):
    memory = handle.get("memory", 80 << 30)
    if memory is None:
        raise NVMLError_NotSupported("Not Supported")
    return SimpleNamespace(total=memory)


def nvmlDeviceGetP2PStatus(first, second, index):
    assert index == NVML_P2P_CAPS_INDEX_NVLINK
    if first.get("nvlink") is None:
        return NVML_P2P_STATUS_UNKNOWN
    joined = second["uuid"] in first["nvlink"]
    return NVML_P2P_STATUS_OK if joined else NVML_P2P_STATUS_NOT_SUPPORTED


def nvmlDeviceGetMigMode(handle):
    if handle.get("mig") is None:
        raise NVMLError_NotSupported("Not Supported")
    return [NVML_DEVICE_MIG_ENABLE if handle["mig"] else NVML_DEVICE_MIG_DISABLE] * 2


def nvmlDeviceGetMaxMigDeviceCount(handle):
    return len(handle.get("mig") or [])


def nvmlDeviceGetMigDeviceHandleByIndex(handle, index):
    if handle["mig"][index] is None:
        raise NVMLError_NotFound("Not Found")
    return handle["mig"][index]


def nvmlDeviceGetCpuAffinity(handle, words):
    cores = handle.get("cores", [])
    if cores is None:
        raise NVMLError_NotSupported("Not Supported")
    masks = [0] * words
    for core in cores:
        if core // 64 < words:
            masks[core // 64] |= 1 << core % 64
    return masks
