"""Rechunks of CuPy arrays by P2P: right, from device to device, and larger than the device.

Workers are one per GPU, or two that share the only one.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_launching import launch, sharing
from hpcdask.gpu.devices import Gpu

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

HEAD = """
import json, os, signal, sys, time
import dask, dask.array as da, numpy as np
from distributed import Client, wait
from hpcdask.bench.cluster import wait_until_warm

def on_device(x, chunks):
    def move(block):
        import cupy
        return cupy.asarray(block)
    return da.from_array(x, chunks).map_blocks(move, dtype=x.dtype, meta=x[:0])

def on_host(x):
    meta = np.empty((0,) * x.ndim, x.dtype)
    return x.map_blocks(lambda block: block.get(), dtype=x.dtype, meta=meta)

def made(rows, columns, height, seconds=0, last=None):
    '''Rows of float64 numbers, each element its own, chunks of `height` rows.'''
    def block(block_id=None):
        import cupy
        if last is not None and block_id[0] == last:
            end_once("transfer")
        time.sleep(seconds)
        return cupy.arange(columns, dtype="float64") + columns * (
            block_id[0] * height + cupy.arange(height, dtype="float64")[:, None])
    return da.map_blocks(block, chunks=((height,) * (rows // height), (columns,)), dtype=float,
                         meta=np.empty((0, 0)))

def is_right(block, block_info=None):
    import cupy
    (top, bottom), (left, right) = block_info[0]["array-location"]
    rows = cupy.arange(top, bottom, dtype="float64")[:, None]
    expected = rows * block_info[0]["shape"][1] + cupy.arange(left, right, dtype="float64")
    return (block == expected).all().reshape(1, 1).get()

def check(y):
    return bool(y.map_blocks(is_right, chunks=(1, 1), dtype=bool, meta=np.empty((0, 0), bool))
                .compute().all())

def kept():
    '''Keys in the workers' stores, once those of a rechunk that is over had time to leave.'''
    deadline = time.monotonic() + 10
    while True:
        found = client.run(lambda dask_worker: [str(key) for key in dask_worker.data])
        if not any(found.values()) or time.monotonic() > deadline:
            return sum(found.values(), [])
        time.sleep(0.1)

# else dask joins chunks by Dask tasks before, up to 128 MiB
dask.config.set({"array.chunk-size": "1 B"})
client = Client()
count = int(sys.argv[1])
client.wait_for_workers(count)
wait_until_warm(client)
"""

RIGHT = """
patterns = [
    ((100,), ((30, 30, 40),), ((100,),)),
    ((1001,), ((400, 400, 201),), ((1, 500, 500),)),
    ((130, 170), ((30, 50, 50), (170,)), ((130,), (40, 40, 40, 50))),
    ((1300, 850), ((500, 800), (1, 849)), ((300, 1000), (250, 600))),
    ((60, 50, 40), ((20, 20, 20), (50,), (40,)), ((60,), (30, 20), (11, 29))),
    ((2, 901, 1), ((1, 1), (300, 300, 301), (1,)), ((2,), (201, 700), (1,))),
]
dtypes = ["bool", "int8", "uint8", "int16", "int32", "int64", "uint64", "float16", "float32",
          "float64", "complex64", "complex128"]
wrong = []
with dask.config.set({"distributed.p2p.storage.disk": sys.argv[2] == "disk"}):
    for shape, old, new in patterns:
        for dtype in dtypes if shape == (130, 170) else ["float64"]:
            x = np.arange(np.prod(shape)).reshape(shape) % 251
            x = (x % 2 if dtype == "bool" else x * (1 - 2j) if dtype[0] == "c" else x)
            x = x.astype("int64" if dtype == "int8" else dtype).astype(dtype)
            y = on_device(x, old).rechunk(new, method="p2p")
            found = on_host(y).compute()
            if found.dtype != x.dtype or not np.array_equal(found, x):
                wrong.append([shape, dtype])

    x = np.random.default_rng(0).random((512, 300))
    with dask.config.set({"array.rechunk.method": "p2p"}):
        spectrum = da.fft.fft(on_device(x, (100, 300)).rechunk({0: -1, 1: 70}), axis=0)
    assert any("p2p" in name for name in spectrum.dask.layers), list(spectrum.dask.layers)
    fft = bool(np.allclose(on_host(spectrum).compute(), np.fft.fft(x, axis=0)))
print(json.dumps({"wrong": wrong, "fft": fft, "kept": kept()}))
"""

ON_DEVICE = """
def watch(dask_worker):
    '''Note what is copied to the host, to be serialized or pickled.'''
    import copyreg, cupy
    dask_worker.crossed = crossed = []
    copy = cupy.asnumpy
    def asnumpy(array, *args, **kwargs):
        crossed.append(array.nbytes)
        return copy(array, *args, **kwargs)
    def reduce(array):
        crossed.append(array.nbytes)
        return array.__reduce__()
    cupy.asnumpy = asnumpy
    copyreg.pickle(cupy.ndarray, reduce)

client.run(watch)
x = made(8192, 8192, 512).persist()
wait(x)
right = [check(x.rechunk((8192, width), method="p2p")) for width in (512, 16)]
crossed = client.run(lambda dask_worker: dask_worker.crossed)
transports = client.run(lambda dask_worker: list(dask_worker.peer_transports.values()))
print(json.dumps({"right": right, "crossed": sum(crossed.values(), []),
                  "transports": sorted(set(sum(transports.values(), [])))}))
"""

TIMES = """
result = {}
for side, height in ((16384, 512), (32768, 1024)):
    x = made(side, side, height).persist()
    wait(x)
    for method in ("tasks", "p2p", "tasks", "p2p", "tasks", "p2p"):
        start = time.perf_counter()
        y = x.rechunk((side, height), method=method).persist()
        wait(y)
        seconds = time.perf_counter() - start
        result.setdefault(f"{side} x {side} float64, {method}", []).append(round(seconds, 3))
        del y
    del x
print(json.dumps(result))
"""

LARGE = """
x = made(8192, 65536, 128)
start = time.perf_counter()
right = check(x.rechunk((8192, 1024), method="p2p"))
seconds = time.perf_counter() - start

def look(dask_worker):
    import rmm
    return rmm.mr.get_current_device_resource().pool_size(), dask_worker.spilled

pools, spilled = zip(*client.run(look).values())
print(json.dumps({"right": right, "seconds": seconds, "nbytes": x.nbytes, "pools": pools,
                  "spilled": spilled, "kept": kept()}))
"""

COUNT_SPILLS = """
def count_spills(dask_worker):
    import dask_cuda.device_host_file as store
    dask_worker.spilled = 0
    func = dask_worker.data.device_host_func
    dump = func.dump
    def counted(value):
        dask_worker.spilled += 1
        return dump(value)
    func.dump = counted

client.run(count_spills)
"""

KILLS = """
flag, when = sys.argv[2] + "/killed", sys.argv[3]

def end_once(phase):
    '''End this worker, the first time that this phase is reached.'''
    if phase != when:
        return
    try:
        open(flag, "x").close()
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)

def last_step(block, block_id=None):
    if block_id == (0, 20):
        end_once("unpack")
    return block

x = made(4096, 4096, 128, seconds=0.05, last=20)
y = x.rechunk((4096, 128), method="p2p")
right = check(y.map_blocks(last_step, dtype=float, meta=np.empty((0, 0))))
print(json.dumps({"right": right, "killed": os.path.exists(flag), "kept": kept()}))
"""


def run(
    tmp_path: Path, gpus: list[Gpu], program: str, *arguments: str, options: tuple[str, ...] = ()
) -> dict:
    """What a program prints as its last line, on two workers at least."""
    count = max(2, len(gpus))
    script = tmp_path / "rechunks.py"
    script.write_text(HEAD + program)
    given = [*sharing(count, gpus), *options]
    words = [str(script), str(count), *arguments]
    done = launch(count, "--protocol", "ucx", *given, *words, timeout=40)
    print(done.stderr)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("storage", ["disk", "memory"])
def test_results_are_numpy_s(gpus: list[Gpu], tmp_path: Path, storage: str) -> None:
    found = run(tmp_path, gpus, RIGHT, storage)
    assert found == {"wrong": [], "fft": True, "kept": []}


def test_nothing_goes_through_the_host(gpus: list[Gpu], tmp_path: Path) -> None:
    found = run(tmp_path, gpus, ON_DEVICE)
    # the one byte of a check's result is no array on the device any more
    assert found == {"right": [True, True], "crossed": [], "transports": ["ucx"]}


def test_times(gpus: list[Gpu], tmp_path: Path) -> None:
    for what, seconds in run(tmp_path, gpus, TIMES).items():
        print(f"{what}: {seconds} s")


def test_a_rechunk_that_is_larger_than_the_device(gpus: list[Gpu], tmp_path: Path) -> None:
    small = ("--device-memory-limit", "256MiB", "--rmm-pool-size", "512MiB")
    found = run(tmp_path, gpus, COUNT_SPILLS + LARGE, options=small)
    print(found)
    assert found["right"]
    assert all(found["spilled"])
    assert max(found["pools"]) < found["nbytes"] / len(found["pools"]) / 1.5
    assert not found["kept"]


@pytest.mark.parametrize("phase", ["transfer", "unpack"])
def test_a_worker_that_dies_half_way(gpus: list[Gpu], tmp_path: Path, phase: str) -> None:
    found = run(tmp_path, gpus, KILLS, str(tmp_path), phase)
    assert found == {"right": True, "killed": True, "kept": []}
