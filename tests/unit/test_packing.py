"""Two-bit packing: round trips, refusals, lazy forms, products; the CUDA kernels on an emulator."""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from types import SimpleNamespace

import dask
import dask.array as da
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpcdask.workloads import (
    WorkloadError,
    count_tasks,
    integer_gpu,
    packing,
)
from hpcdask.workloads.packing import (
    multiply,
    multiply_transposed,
    pack,
    pack_array,
    unpack,
    unpack_array,
)
from launching import unavailable

FEW = settings(max_examples=20, deadline=None)
INTEGERS = [np.bool_, np.uint8, np.int8, np.int16, np.uint32, np.int64, np.uint64]
FLOATS = [np.float32, np.float64]
# Of the largest element: what rounding leaves of sums of this many terms.
TOLERANCE = {np.float32: 2e-6, np.float64: 1e-14}


@pytest.fixture(autouse=True)
def _synchronous():
    with dask.config.set(scheduler="synchronous"):
        yield


def genotypes(shape, dtype=np.uint8, seed=0):
    top = 2 if dtype == np.bool_ else 4
    return np.random.default_rng(seed).integers(0, top, shape).astype(dtype)


def close(found, expected):
    scale = max(1, np.abs(expected).max(initial=0))
    return np.abs(found - expected).max(initial=0) <= TOLERANCE[found.dtype.type] * scale


# --- pack and unpack ------------------------------------------------------------------------------


def test_the_layout_is_the_documented_one():
    packed = pack(np.array([[1, 2, 3, 0, 3], [0, 0, 0, 2, 1]]))
    assert packed.tolist() == [[1 + (2 << 2) + (3 << 4), 3], [2 << 6, 1]]


@FEW
@given(
    others=st.lists(st.integers(0, 6), max_size=3),
    n=st.integers(0, 70),
    dtype=st.sampled_from(INTEGERS),
    out=st.sampled_from([*INTEGERS, *FLOATS]),
)
def test_packing_and_unpacking_is_the_identity(others, n, dtype, out):
    values = genotypes((*others, n), dtype)
    packed = pack(values)
    assert packed.dtype == np.uint8
    assert packed.shape == (*others, -(-n // 4))
    again = unpack(packed, n, out)
    assert again.dtype == out
    assert again.flags.c_contiguous
    np.testing.assert_array_equal(again, values.astype(out))


@pytest.mark.parametrize("shape", [(3, packing.TILE + 5), (70_001,), (2, 500, 333)])
def test_arrays_larger_than_a_tile(shape):
    values = genotypes(shape)
    np.testing.assert_array_equal(unpack(pack(values), shape[-1]), values)


def test_views_and_big_endian_values():
    values = genotypes((50, 41), ">i2")
    np.testing.assert_array_equal(unpack(pack(values[::2, ::-1]), 41), values[::2, ::-1])
    packed = pack(values)
    np.testing.assert_array_equal(unpack(packed[::3], 41), values[::3])


@pytest.mark.parametrize(
    ("dtype", "bad"), [(np.uint8, 4), (np.int8, -1), (np.int64, 256), (np.uint64, 2**63)]
)
def test_values_outside_the_range_are_counted_and_located(dtype, bad):
    values = genotypes((300, 301)).astype(dtype)
    values[270, 17] = values[299, 0] = bad
    with pytest.raises(WorkloadError, match=rf"2 of 90300 .* first is {bad} at index \(270, 17\)"):
        pack(values)


def test_what_cannot_be_packed_or_unpacked_is_refused():
    with pytest.raises(WorkloadError, match=r"float64 values with 1 axes"):
        pack(np.ones(3))
    with pytest.raises(WorkloadError, match="at least one axis"):
        pack(np.uint8(1))
    with pytest.raises(WorkloadError, match="n=9 values take 3 bytes; the rows have 2"):
        unpack(np.zeros((5, 2), np.uint8), 9)
    with pytest.raises(WorkloadError, match="uint8"):
        unpack(np.zeros((5, 2), np.int8), 8)


@pytest.mark.parametrize(
    "out", [np.empty((3, 7)), np.empty((3, 16))[:, :8], np.empty(24), np.empty((8, 3)).T]
)
def test_unpack_fills_what_fits(out):
    packed = pack(np.ones((3, 8), np.uint8))
    with pytest.raises(
        WorkloadError, match=r"contiguous NumPy array of shape \(3, 8\), for packed"
    ):
        unpack(packed, 8, out=out)
    fits = np.empty((3, 8))
    assert unpack(packed, 8, out=fits) is fits
    assert (fits == 1).all()


# --- lazy -----------------------------------------------------------------------------------------


@FEW
@given(
    rows=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    quads=st.lists(st.integers(1, 5), max_size=3),
    last=st.integers(1, 9),
    dtype=st.sampled_from([np.bool_, np.uint8, np.int32, np.float32]),
)
def test_lazy_round_trip(rows, quads, last, dtype):
    chunks = (tuple(rows), (*(4 * q for q in quads), last))
    values = genotypes((sum(rows), sum(chunks[1])))
    packed = pack_array(da.from_array(values, chunks=chunks))
    assert packed.chunks == (chunks[0], (*quads, -(-last // 4)))
    np.testing.assert_array_equal(packed.compute(), pack(values))
    again = unpack_array(packed, values.shape[1], dtype)
    assert again.chunks == chunks
    assert again.dtype == dtype
    np.testing.assert_array_equal(again.compute(), values.astype(dtype))


def test_one_dask_task_per_chunk():
    x = da.zeros((40, 30), chunks=(10, 16), dtype=np.uint8)
    assert count_tasks(pack_array(x)) == 8 + 1  # and one to put the chunks together
    again = unpack_array(pack_array(x), 30)
    assert count_tasks(again) == 8 + 1
    assert count_tasks(again.map_blocks(np.negative)) == 8 + 1


def test_lazy_refusals_come_before_anything_is_computed():
    with pytest.raises(WorkloadError, match=r"x = x.rechunk\({1: 12}\)") as refusal:
        pack_array(da.zeros((5, 25), chunks=(5, 10), dtype=np.uint8))
    assert "(10, 10, 5)" in str(refusal.value)
    with pytest.raises(WorkloadError, match=r"\(6, 6, 6, 6, 6, \.\.\.\)"):
        pack_array(da.zeros(90, chunks=6, dtype=np.uint8))
    with pytest.raises(WorkloadError, match="float64"):
        pack_array(da.zeros(8, chunks=4))
    x = da.zeros(8, chunks=4, dtype=np.uint8)
    with pytest.raises(WorkloadError, match="compute_chunk_sizes"):
        pack_array(x[x > 0])
    with pytest.raises(WorkloadError, match="n=33 values take 9 bytes"):
        unpack_array(x, 33)


# --- products -------------------------------------------------------------------------------------


@FEW
@given(
    m=st.integers(0, 200),
    n=st.integers(0, 70),
    columns=st.integers(0, 33),
    dtype=st.sampled_from(FLOATS),
)
def test_products_equal_those_of_the_unpacked_matrix(m, n, columns, dtype):
    values = genotypes((m, n))
    rng = np.random.default_rng(1)
    right, left = (rng.standard_normal((size, columns)).astype(dtype) for size in (n, m))
    packed = pack(values)
    for found, expected in [
        (multiply(packed, right, n), values @ right.astype(np.float64)),
        (multiply_transposed(packed, left, n), values.T @ left.astype(np.float64)),
    ]:
        assert found.dtype == dtype
        assert found.shape == expected.shape
        assert close(found, expected)


def test_sums_over_tiles_of_rows_are_float64(monkeypatch):
    monkeypatch.setitem(packing.TILE_NBYTES, "cpu", 1)
    m = 64 * 200
    packed = pack(np.ones((m, 4), np.uint8))
    left = np.full((m, 1), 1 / 3, np.float32)
    left[0] = 2**22  # to which a float32 sum adds a half for a third
    found = multiply_transposed(packed, left, 4)
    assert found == pytest.approx(np.full((4, 1), left.astype(np.float64).sum()), abs=64 / 3)
    assert multiply(packed, left[:4], 4) == pytest.approx(np.full((m, 1), 2.0**22 + 1), abs=1)


def test_factors_that_do_not_fit_are_refused():
    packed = pack(genotypes((6, 10)))
    for product, rows in [(multiply, 10), (multiply_transposed, 6)]:
        with pytest.raises(WorkloadError, match=rf"\(6, 3\) .* \(5, 2\) .* {rows} rows"):
            product(packed, np.zeros((5, 2)), 10)
        with pytest.raises(WorkloadError, match="int64: float32 or float64"):
            product(packed, np.zeros((rows, 2), int), 10)
        with pytest.raises(WorkloadError, match="n=20 values"):
            product(packed, np.zeros((rows, 2)), 20)


# --- the CUDA kernels, on an emulator -------------------------------------------------------------

# Threads of a block are contexts that take turns at every barrier, in changing order; a barrier
# before each mma stands for the lock step of a warp.
EMULATOR = r"""
#include <cmath>
#include <cstring>
#include <ucontext.h>
#include <vector>
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(threads, blocks)
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
typedef unsigned int u32;
struct uint2 { u32 x, y; };
struct Dim { u32 x, y; };
struct Copy { void* to; const void* from; };
static const int MAX_THREADS = 128, STACK = 1 << 16;
static Dim threadIdx, blockIdx, blockDim, gridDim;
static ucontext_t scheduler, contexts[MAX_THREADS];
static bool done[MAX_THREADS];
static char stacks[MAX_THREADS][STACK];
static std::vector<Copy> copies[MAX_THREADS];
static unsigned long long arguments[10];
static void* kernel;

static void __syncthreads() {
    u32 me = threadIdx.x;
    swapcontext(&contexts[me], &scheduler);
    threadIdx.x = me;
}
static void copy_16_bytes(void* to, const void* from) {
    copies[threadIdx.x].push_back({to, from});
}
static void wait_for_copies() {
    for (Copy c : copies[threadIdx.x]) memcpy(c.to, c.from, 16);
    copies[threadIdx.x].clear();
}
// The fragments of the PTX manual: a is rows by terms, b terms by columns.
struct Fragment { unsigned char a[16]; signed char b[8]; };
static Fragment fragments[2][MAX_THREADS];
static int turn[MAX_THREADS];
static void mma(int (&c)[4], const u32 (&a)[4], uint2 b) {
    int me = threadIdx.x, lane = me % 32, mine = turn[me] ^= 1;
    memcpy(fragments[mine][me].a, a, 16);
    memcpy(fragments[mine][me].b, &b, 8);
    __syncthreads();
    const Fragment* warp = fragments[mine] + me - lane;
    for (int i = 0; i < 4; ++i) {
        int row = lane / 4 + (i >= 2 ? 8 : 0), column = lane % 4 * 2 + (i & 1);
        for (int k = 0; k < 32; ++k) {
            int ai = k % 4 + (row >= 8 ? 4 : 0) + (k >= 16 ? 8 : 0), bi = k % 4 + (k >= 16 ? 4 : 0);
            c[i] += warp[row % 8 * 4 + k % 16 / 4].a[ai] * warp[column * 4 + k % 16 / 4].b[bi];
        }
    }
}
static long long __double_as_longlong(double x) { long long y; memcpy(&y, &x, 8); return y; }
static u32 __funnelshift_r(u32 low, u32 high, u32 n) {
    return (u32)((((unsigned long long)high << 32) | low) >> (n & 31));
}
static u32 __byte_perm(u32 x, u32 y, u32 s) {
    unsigned long long both = ((unsigned long long)y << 32) | x;
    u32 out = 0;
    for (int i = 0; i < 4; ++i) out |= (u32)(both >> 8 * (s >> 4 * i & 7) & 255) << 8 * i;
    return out;
}
template <class T> static void atomicAdd(T* to, T x) { *to += x; }
template <class T> static void atomicMax(T* to, T x) { if (x > *to) *to = x; }

static void body() {
    u32 me = threadIdx.x;
    unsigned long long* a = arguments;
    typedef unsigned long long W;
    ((void (*)(W, W, W, W, W, W, W, W, W, W))kernel)(
        a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]);
    done[me] = true;
}
extern "C" void launch(void* function, u32 grid_x, u32 grid_y, u32 block, const void* args) {
    kernel = function;
    memcpy(arguments, args, sizeof arguments);
    gridDim = {grid_x, grid_y};
    blockDim = {block, 1};
    for (blockIdx.y = 0; blockIdx.y < grid_y; ++blockIdx.y)
        for (blockIdx.x = 0; blockIdx.x < grid_x; ++blockIdx.x) {
            for (u32 i = 0; i < block; ++i) {
                getcontext(&contexts[i]);
                contexts[i].uc_stack.ss_sp = stacks[i];
                contexts[i].uc_stack.ss_size = STACK;
                contexts[i].uc_link = &scheduler;
                makecontext(&contexts[i], body, 0);
                done[i] = false;
            }
            for (u32 round = 0, left = block; left; ++round)
                for (u32 i = 0; i < block; ++i) {
                    u32 me = round % 3 ? i : block - 1 - i;
                    if (done[me]) continue;
                    threadIdx.x = me;
                    swapcontext(&scheduler, &contexts[me]);
                    left -= done[me];
                }
        }
}
"""


class Array(np.ndarray):
    """A NumPy array that is asked for its address as a CuPy array is."""

    @property
    def data(self):
        return SimpleNamespace(ptr=self.ctypes.data)


def array(x):
    return np.ascontiguousarray(x).view(Array)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """A stand-in for CuPy that compiles kernels with g++ and runs them on this CPU."""
    if not shutil.which("g++"):
        unavailable("no g++ on this machine: apt-get install g++")
    folder = tmp_path_factory.mktemp("kernels")

    @functools.cache
    def library(code, options):
        source = folder / f"{abs(hash(options))}.cpp"
        source.write_text("#define EMULATED\n" + EMULATOR + code)
        out = source.with_suffix(".so")
        flags = ["-O1", "-shared", "-fPIC", "-w", "-std=gnu++17"]
        subprocess.run(["g++", *flags, *options, source, "-o", out], check=True, timeout=100)
        return ctypes.CDLL(str(out))

    class RawKernel:
        def __init__(self, code, name, options):
            self.emulator = library(code, options)
            self.function = getattr(self.emulator, name)

        def __call__(self, grid, block, args):
            words = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in args]
            words = (ctypes.c_longlong * 10)(*words)
            self.emulator.launch(self.function, *(*grid, 1)[:2], *block, words)

    return SimpleNamespace(
        RawKernel=RawKernel,
        zeros=lambda *args: array(np.zeros(*args)),
        empty=lambda *args: array(np.full(*args[:1], 77, *args[1:])),
        ascontiguousarray=lambda x, **options: array(np.ascontiguousarray(x, **options)),
        cuda=SimpleNamespace(Device=lambda: SimpleNamespace(attributes={"MultiProcessorCount": 2})),
    )


@pytest.fixture
def gpu(emulated, monkeypatch):
    monkeypatch.setattr(integer_gpu, "array_module", lambda device: emulated)
    integer_gpu._kernel.cache_clear()
    yield integer_gpu
    integer_gpu._kernel.cache_clear()


def stored(values, per_byte):
    return array(pack(values) if per_byte == 4 else values)


def small_integers(shape, per_byte):
    return np.random.default_rng(0).integers(0, 4 if per_byte == 4 else 256, shape, dtype=np.uint8)


each_form = pytest.mark.parametrize("per_byte", [4, 1], ids=["2 bits", "8 bits"])


@each_form
@pytest.mark.parametrize(
    ("m", "n", "columns", "dtype"),
    [
        (1, 1, 1, np.float32),
        (300, 530, 2, np.float32),
        (259, 1056, 1, np.float64),  # rows of a multiple of 8 bytes
        (130, 7, 20, np.float64),  # three groups of six tiles
    ],
)
def test_kernels(gpu, m, n, columns, dtype, per_byte):
    values = small_integers((m, n), per_byte)
    rng = np.random.default_rng(2)
    right, left = (rng.standard_normal((size, columns)).astype(dtype) for size in (n, m))
    matrix, floats = stored(values, per_byte), values.astype(np.float64)
    for found, expected in [
        (gpu.multiply(matrix, array(right), per_byte), floats @ right),
        (gpu.multiply_transposed(matrix, array(left), n, per_byte), floats.T @ left),
    ]:
        assert found.shape == expected.shape
        assert close(found.astype(dtype), expected)


@each_form
def test_kernels_part_by_part_and_exactly(gpu, monkeypatch, per_byte):
    m, n = 700, 301
    values = small_integers((m + 1, n), per_byte)
    matrix, floats = stored(values, per_byte)[1:], values[1:].astype(np.float64)  # begin anywhere
    rng = np.random.default_rng(3)
    right, left = (rng.integers(-2000, 2000, (k, 2)).astype(np.float32) for k in (n, m))
    for nbytes, terms in (1 << 26, 1 << 20), (4096, 128):  # of all at once, and of a few at a time
        monkeypatch.setattr(integer_gpu, "SCRATCH_NBYTES", nbytes)
        monkeypatch.setattr(integer_gpu, "MAX_TERMS", {per_byte: terms})
        found = gpu.multiply(matrix, array(right), per_byte)
        np.testing.assert_array_equal(found, floats @ right)
        found = gpu.multiply_transposed(matrix, array(left), n, per_byte)
        np.testing.assert_array_equal(found, floats.T @ left)


@pytest.mark.parametrize(("per_byte", "largest"), [(4, 3), (1, 255)])
def test_sums_of_the_largest_values_fit_32_bits(per_byte, largest):
    terms = integer_gpu.MAX_TERMS[per_byte]
    assert terms * largest * 128 < 2**31 <= (terms + 128) * largest * 128
    assert terms % 128 == 0


def test_kernels_on_columns_of_any_size(gpu):
    values = genotypes((40, 16))
    factor = np.random.default_rng(4).standard_normal((40, 7)).astype(np.float32)
    factor[:, :5] *= np.float32([0, 1e-38, 1e-30, 1e30, 1e37])
    factor[7, 5], factor[8, 6] = np.nan, -np.inf
    found = gpu.multiply_transposed(array(pack(values)), array(factor), 16, 4)
    assert np.isnan(found[:, 5:]).all()
    assert (found[:, 0] == 0).all()
    expected = values.T @ factor[:, :5].astype(np.float64)
    assert (np.abs(found[:, :5] - expected) <= 1e-6 * np.abs(expected).max(axis=0)).all()


def test_what_is_no_packed_array():
    """A list was an AttributeError."""
    with pytest.raises(WorkloadError, match="packed values are uint8"):
        unpack([228, 11], 6)
    with pytest.raises(WorkloadError, match="n=-1 values: a row has 0 or more"):
        unpack(np.empty(0, np.uint8), -1)
