"""Made-up genotypes of known population structure, written to a Zarr store by the workers.

They follow Balding and Nichols, Genetica 96 (1995), 3-12: populations whose allele frequencies
scatter around an ancestral one, by a beta distribution of a given FST.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import dask.array as da
import numpy as np
from numpy.typing import NDArray

from hpcdask.workloads import WorkloadError, check_whole, slab_rows, sum_of_chunks
from hpcdask.workloads.genotypes import MISSING
from hpcdask.workloads.zarr import zarr_module

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
    seed: int = 0,
    overwrite: bool = False,
) -> da.Array:
    """Write made-up genotypes (variants, samples) to a Zarr store from the workers; sum them.

    The store is made at once, its chunks when the result, uint64 of shape (), is computed. Allele
    frequencies are up to 0.5, populations differ by an FST of 0.1, and 3 % are missing. Row i of
    chunks draws from ``SeedSequence(seed, spawn_key=(i,))``: the same on any cluster.
    """
    check_whole("seed", seed)
    if min(*shape, *chunks) < 1:
        raise WorkloadError(f"shape {shape} and chunks {chunks} must be positive")
    if not 1 <= n_populations <= shape[1]:
        raise WorkloadError(f"n_populations={n_populations} is out of range: 1 to {shape[1]}")
    path = os.path.abspath(path)
    if os.path.exists(path) and not overwrite:
        raise WorkloadError(f"{path} exists: choose another path, or say overwrite=True")
    zarr = zarr_module()
    # lz4 is read faster than zstd, zarr's default
    codec = importlib.import_module("zarr.codecs").BloscCodec(cname="lz4", shuffle="bitshuffle")
    what: dict[str, Any] = {"shape": shape, "chunks": chunks, "dtype": "uint8"}
    try:
        zarr.create_array(path, **what, fill_value=MISSING, compressors=codec, overwrite=overwrite)
    except OSError as exc:
        raise WorkloadError(f"{path} cannot be made: {exc}") from exc
    rows = slab_rows(*shape, n_slots=n_slots, max_nbytes=WRITE_NBYTES, multiple=chunks[0])
    how = {"path": path, "rows": rows, "n_populations": n_populations, "seed": seed}
    return sum_of_chunks(_write, n_chunks=len(rows), width=1, dtype=np.uint64, **how)


def _write(
    *, path: str, rows: tuple[int, ...], n_populations: int, seed: int, block_id: Any
) -> NDArray[np.uint64]:
    array = zarr_module().open_array(path, mode="r+")
    start, height, total = sum(rows[: block_id[0]]), array.chunks[0], 0
    for top in range(start, start + rows[block_id[0]], height):
        seeds = np.random.SeedSequence(seed, spawn_key=(top // height,))
        size = min(height, array.shape[0] - top), array.shape[1]
        block = _draw(size, n_populations, seeds)
        array[top : top + size[0]] = block
        total += int(block.sum(dtype=np.uint64))
    return np.full((1, 1), total, np.uint64)


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
