"""A stand-in for NVML's Python package, for tests on machines without a GPU.

Put this folder first on PYTHONPATH and describe the machine in FAKE_NVML, as JSON: a list of
GPUs, in NVML's order, with ``uuid`` and, where it matters, ``name``, ``memory`` (bytes), ``bus``
(PCI bus id), ``cores`` (near CPU cores; null: not supported) and ``mig`` (null: not capable;
empty: disabled; else one entry per slot: a slice with ``uuid``, ``name`` and ``memory``, or null
where the slot is free), ``forbidden`` (true: a cgroup keeps it from this process) and ``nvlink``
(UUIDs of the GPUs that NVLink joins it to; null, or left out: not told). What a GPU or slice does
now stands under ``now``: ``utilisation`` (percent), ``used`` (bytes), ``power`` (mW), ``energy``
(mJ), ``reasons`` (a bit mask), ``clock`` (MHz), ``temperature`` (°C), and ``fields``: values by
``number:scope``, ``links`` (the state of each NVLink), ``remapped`` (rows, as NVML has them) and
``processes`` (id and bytes of each). What is left out is not supported. FAKE_NVML may be the name
of a file. Without FAKE_NVML there is no driver. Like the real one it refuses calls before nvmlInit.
"""

import json
import os
from types import SimpleNamespace

NVML_P2P_CAPS_INDEX_NVLINK = 2
NVML_SUCCESS, NVML_ERROR_NOT_SUPPORTED = 0, 3
NVML_CLOCK_SM = 1
NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3
NVML_P2P_STATUS_OK, NVML_P2P_STATUS_NOT_SUPPORTED, NVML_P2P_STATUS_UNKNOWN = 0, 5, 6
nvmlMemory_v2 = 0x2000028


class NVMLError(Exception):
    """Base of NVML's errors."""


class NVMLError_Uninitialized(NVMLError):
    """Called before nvmlInit."""


class NVMLError_NoPermission(NVMLError):
    """A cgroup keeps the device from this process."""


class NVMLError_LibraryNotFound(NVMLError):
    """There is no driver."""


class NVMLError_NotSupported(NVMLError):
    """The device cannot do that."""


class NVMLError_NotFound(NVMLError):
    """There is no such slice."""


class NVMLError_FunctionNotFound(NVMLError):
    """The driver is older than that."""


class NVMLError_InvalidArgument(NVMLError):
    """There is no such index."""


_started = False


def _gpus():
    if not _started:
        raise NVMLError_Uninitialized("Uninitialized")
    told = os.environ["FAKE_NVML"]
    if not told.startswith("["):
        with open(told) as file:
            told = file.read()
    return json.loads(told)


def nvmlInit():
    global _started
    if "FAKE_NVML" not in os.environ:
        raise NVMLError_LibraryNotFound("NVML Shared Library Not Found")
    _started = True


def nvmlSystemGetDriverVersion():
    return "580.65.06"


def nvmlSystemGetCudaDriverVersion_v2():
    return 13000


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


def nvmlDeviceGetMemoryInfo(handle, version=None):
    memory = handle.get("memory", 80 << 30)
    if memory is None:
        raise NVMLError_NotSupported("Not Supported")
    used = _now(handle, "used") if version else 0
    return SimpleNamespace(total=memory, used=used, free=memory - used)


def nvmlDeviceGetHandleByUUID(uuid):
    for index, gpu in enumerate(_gpus()):
        if gpu["uuid"] == uuid:
            return nvmlDeviceGetHandleByIndex(index)
        for slot in gpu.get("mig") or []:
            if slot is not None and slot["uuid"] == uuid:
                return slot
    raise NVMLError_NotFound("Not Found")


def nvmlDeviceGetIndex(handle):
    for index, gpu in enumerate(_gpus()):
        if gpu["uuid"] == handle["uuid"]:
            return index
    raise NVMLError_NotSupported("Not Supported")


def _now(handle, name):
    """What a GPU does at this moment, which may change between two calls."""
    for gpu in _gpus():
        for one in (gpu, *filter(None, gpu.get("mig") or [])):
            if one["uuid"] == handle["uuid"] and name in one.get("now", {}):
                return one["now"][name]
    raise NVMLError_NotSupported("Not Supported")


def nvmlDeviceGetUtilizationRates(handle):
    return SimpleNamespace(gpu=_now(handle, "utilisation"))


def nvmlDeviceGetPowerUsage(handle):
    return _now(handle, "power")


def nvmlDeviceGetTotalEnergyConsumption(handle):
    return _now(handle, "energy")


def nvmlDeviceGetCurrentClocksThrottleReasons(handle):
    return _now(handle, "reasons")


def nvmlDeviceGetClockInfo(handle, kind):
    return _now(handle, "clock") if kind == NVML_CLOCK_SM else 2619


def nvmlDeviceGetTemperature(handle, sensor):
    return _now(handle, "temperature")


def nvmlDeviceGetNvLinkState(handle, link):
    links = _now(handle, "links")
    if link >= len(links):
        raise NVMLError_InvalidArgument("Invalid Argument")
    return links[link]


def nvmlDeviceGetRemappedRows(handle):
    return tuple(_now(handle, "remapped"))


def nvmlDeviceGetComputeRunningProcesses(handle):
    found = _now(handle, "processes")
    return [SimpleNamespace(pid=pid, usedGpuMemory=nbytes) for pid, nbytes in found]


def nvmlDeviceGetFieldValues(handle, fields):
    def value(number, scope):
        told = _now(handle, "fields").get(f"{number}:{scope}")
        code = NVML_ERROR_NOT_SUPPORTED if told is None else NVML_SUCCESS
        kind, union = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, SimpleNamespace(ullVal=told)
        return SimpleNamespace(nvmlReturn=code, valueType=kind, value=union)

    return [value(number, scope) for number, scope in fields]


def nvmlDeviceGetP2PStatus(first, second, index):
    assert index == NVML_P2P_CAPS_INDEX_NVLINK
    if first.get("nvlink") is None:
        return NVML_P2P_STATUS_UNKNOWN
    joined = second["uuid"] in first["nvlink"]
    return NVML_P2P_STATUS_OK if joined else NVML_P2P_STATUS_NOT_SUPPORTED


def nvmlDeviceGetMigMode(handle):
    if handle.get("mig") is None:
        raise NVMLError_NotSupported("Not Supported")
    return [int(bool(handle["mig"]))] * 2


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
