"""Made-up genotypes of known population structure, written to a Zarr store by the workers.

They follow Balding and Nichols, Genetica 96 (1995), 3-12: populations whose allele frequencies
scatter around an ancestral one, by a beta distribution of a given FST.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, Literal

import dask.array as da
import numpy as np
from numpy.typing import NDArray

from hpcdask.workloads import WorkloadError, check_whole, slab_rows
from hpcdask.workloads.genotypes import MISSING
from hpcdask.workloads.graphs import sum_of_chunks
from hpcdask.workloads.zarr import find
from hpcdask.workloads.zarr_reading import (
    StoredArray,
    in_reading_thread,
    run_inline,
    zarr_module,
)

WRITE_NBYTES = 128_000_000
TILE_ROWS = 256
FST = 0.1
MEAN_MISSING = 0.03


def populations(n_samples: int, n_populations: int) -> NDArray[np.int64]:
    """Return the population of each sample that `write_genotypes` makes, shape (n_samples,)."""
    return np.arange(n_samples, dtype=np.int64) * n_populations // n_samples


def write_genotypes(
    path: str | os.PathLike[str],
    shape: tuple[int, int],
    *,
    chunks: tuple[int, int],
    n_slots: int,
    n_populations: int = 4,
    zarr_format: Literal[2, 3] = 3,
    codec: Literal["lz4", "zstd"] | None = "lz4",
    seed: int = 0,
    overwrite: bool = False,
) -> da.Array:
    """Write made-up genotypes (variants, samples) to a Zarr store from the workers; sum them.

    The store is made at once, its chunks when the result, uint64 of shape (), is computed. Allele
    frequencies are up to 0.5, populations differ by an FST of 0.1, and 3 % are missing. Row i of
    chunks draws from ``SeedSequence(seed, spawn_key=(i,))``: the same on any cluster. lz4 is read
    faster than zstd.
    """
    check_whole("seed", seed)
    if min(*shape, *chunks) < 1:
        raise WorkloadError(f"shape {shape} and chunks {chunks} must be positive")
    if not 1 <= n_populations <= shape[1]:
        raise WorkloadError(f"n_populations={n_populations} is out of range: 1 to {shape[1]}")
    _create(os.path.abspath(path), shape, chunks, zarr_format, codec, overwrite)
    stored = find(path)
    rows = slab_rows(*shape, n_slots=n_slots, max_nbytes=WRITE_NBYTES, multiple=stored.chunk[0])
    how = {"stored": stored, "rows": rows, "n_populations": n_populations, "seed": seed}
    return sum_of_chunks(_write, n_chunks=len(rows), width=1, dtype=np.uint64, **how)


def _create(
    path: str,
    shape: tuple[int, int],
    chunks: tuple[int, int],
    zarr_format: int,
    codec: str | None,
    overwrite: bool,
) -> None:
    zarr = zarr_module()
    if os.path.exists(path) and not overwrite:
        raise WorkloadError(f"{path} exists: choose another path, or say overwrite=True")
    if codec is None:
        compressor = None
    elif zarr_format == 2:
        blosc = importlib.import_module("numcodecs").Blosc
        compressor = blosc(codec, clevel=5, shuffle=blosc.BITSHUFFLE)
    else:
        blosc = importlib.import_module("zarr.codecs").BloscCodec
        compressor = blosc(cname=codec, clevel=5, shuffle="bitshuffle")
    try:
        how = {"compressors": compressor, "zarr_format": zarr_format, "overwrite": overwrite}
        what = {"shape": shape, "chunks": chunks, "dtype": "uint8", "fill_value": MISSING}
        zarr.create_array(path, **what, **how)
    except OSError as exc:
        raise WorkloadError(f"{path} cannot be made: {exc}") from exc


def _write(
    *, stored: StoredArray, rows: tuple[int, ...], n_populations: int, seed: int, block_id: Any
) -> NDArray[np.uint64]:
    start = sum(rows[: block_id[0]])
    total = 0
    for top in range(start, start + rows[block_id[0]], stored.chunk[0]):
        seeds = np.random.SeedSequence(seed, spawn_key=(top // stored.chunk[0],))
        height = min(stored.chunk[0], stored.shape[0] - top)
        block = _draw((height, stored.shape[1]), n_populations, seeds)
        in_reading_thread("cpu", run_inline, _put(stored, top, block)).result()
        total += int(block.sum(dtype=np.uint64))
    return np.full((1, 1), total, np.uint64)


async def _put(stored: StoredArray, top: int, block: NDArray[np.uint8]) -> None:
    array = await stored.open(stored.path, mode="r+")
    await array.setitem((slice(top, top + block.shape[0]), slice(None)), block)


def _draw(
    shape: tuple[int, int], n_populations: int, seeds: np.random.SeedSequence
) -> NDArray[np.uint8]:
    rng = np.random.Generator(np.random.SFC64(seeds))
    ancestral = rng.uniform(1e-4, 0.5, (shape[0], 1))
    spread = (1 - FST) / FST
    p = rng.beta(ancestral * spread, (1 - ancestral) * spread, (shape[0], n_populations))
    known = 65535 * (1 - np.minimum(rng.exponential(MEAN_MISSING, (shape[0], 1)), 0.5))
    # One 16-bit number below each of these bounds adds a copy.
    two, one = ((q * known).astype(np.uint16) for q in (p**2, 1 - (1 - p) ** 2))
    known = known.astype(np.uint16)
    edges = np.searchsorted(populations(shape[1], n_populations), range(n_populations + 1))
    out = np.empty(shape, np.uint8)
    for top in range(0, shape[0], TILE_ROWS):
        rows = slice(top, min(top + TILE_ROWS, shape[0]))
        tile = out[rows]
        # Ten times as fast as rng.integers() of 16 bits.
        raw = rng.bit_generator.random_raw(-(-tile.size // 4)).astype("<u8", copy=False)
        drawn = raw.view("<u2")[: tile.size].reshape(tile.shape)
        np.multiply(drawn >= known[rows], MISSING, out=tile, dtype=np.uint8)
        for i in range(n_populations):
            columns = slice(edges[i], edges[i + 1])
            tile[:, columns] += drawn[:, columns] < two[rows, i : i + 1]
            tile[:, columns] += drawn[:, columns] < one[rows, i : i + 1]
    return out
