"""Population structure of genotypes in a Zarr store: load, filter, normalise, decompose.

This is the genomics behind the Dask blog's "Large SVDs" (May 2020,
https://blog.dask.org/2020/05/13/large-svds). A row is a variant, a column a sample, an element how
many copies of an allele the sample has: 0, 1, 2, or 3 where that is missing.

The normalisation is that of Patterson, Price and Reich, PLoS Genetics 2 (2006), e190, equation 3,
with missing genotypes at the mean of their variant: less the mean, divided by √(2p(1 - p)) with the
allele's frequency p. (The paper divides by √(p(1 - p)).) A variant that is filtered is a row of
zeros: it adds nothing to the singular vectors of samples, and shapes stay known.

Made-up genotypes follow Balding and Nichols, Genetica 96 (1995), 3-12: populations whose allele
frequencies scatter around an ancestral one, by a beta distribution of a given FST.
"""

from __future__ import annotations

import functools
import importlib
import os
from typing import Any

import dask.array as da
import numpy as np
from numpy.typing import NDArray

from hpcdask.workloads import Device, WorkloadError, array_module, sum_of_chunks
from hpcdask.workloads.svd import svd_rows
from hpcdask.workloads.zarr import find, open_rows, zarr_module

MISSING = 3
MAX_MISSING = 0.1
MIN_MAF = 0.01
TILE_NBYTES: dict[Device, int] = {"cuda": 1 << 28, "cpu": 1 << 20}
#: Of made-up genotypes: how far populations are apart, and the mean part that is missing.
FST, MEAN_MISSING = 0.1, 0.03


def population_structure(
    path: str | os.PathLike[str],
    k: int,
    *,
    n_slots: int,
    device: Device = "cuda",
    component: str | None = None,
    max_missing: float = MAX_MISSING,
    min_maf: float = MIN_MAF,
    oversample: int = 10,
    max_nbytes: int | None = None,
) -> tuple[da.Array, da.Array, da.Array]:
    """Find the main axes of variation between samples of a stored genotype matrix.

    Parameters
    ----------
    path, component, n_slots, device, max_nbytes
        As for `hpcdask.workloads.zarr.open_rows`; uint8, variants by samples.
    k, oversample
        As for `hpcdask.workloads.svd.svd_rows`; n populations are told apart by the first n - 1.
    max_missing
        Variants with a larger fraction of missing genotypes are dropped.
    min_maf
        Variants whose rarer allele has a lower frequency are dropped, and those with one allele.

    Returns
    -------
    s, v, variants : dask.array.Array
        The k singular values, coordinates of the samples on k axes, (k, samples), and the numbers
        of variants kept, dropped because too many samples miss them, and dropped as too rare.
        Computed together, all three share one reading.

    Raises
    ------
    WorkloadError
        Before anything is computed: no such matrix, not uint8, a store that lacks chunks and gives
        them another value than 3 (missing), ``k`` or a threshold out of range. From workers: values
        above 3, and as from `hpcdask.workloads.zarr.open_rows`.
    """
    if not (0 <= max_missing <= 1 and 0 <= min_maf <= 0.5):
        raise WorkloadError(
            f"max_missing={max_missing} or min_maf={min_maf} is out of range: a fraction from 0 "
            "to 1, and a frequency from 0 to 0.5"
        )
    how: dict[str, Any] = {"n_slots": n_slots, "max_nbytes": max_nbytes, "component": component}
    x, array = open_rows(path, device=device, **how), find(path, component)
    if x.dtype != np.uint8:  # others may have -1 for missing
        raise WorkloadError(
            f"genotypes are {x.dtype}, not uint8: 0, 1, 2 copies of an allele, {MISSING} for "
            "missing: x = x.astype('uint8')"
        )
    if array.fill_value != MISSING and array.nchunks_initialized < array.nchunks:
        raise WorkloadError(
            f"{array.store_path} lacks some of its chunks, which would be read as genotype "
            f"{array.fill_value}: write them, or the store with fill_value={MISSING} (missing)"
        )
    limits: dict[str, Any] = {"max_missing": max_missing, "min_maf": min_maf}
    prepare = functools.partial(normalise, **limits)
    _, s, v = svd_rows(x, k, oversample=oversample, prepare=prepare, device=device)
    how = {"n_chunks": x.numblocks[0], "width": 3, "dtype": np.int64, "device": device}
    return s, v, sum_of_chunks(_count, x, **limits, **how)


def normalise(tile: Any, *, max_missing: float = MAX_MISSING, min_maf: float = MIN_MAF) -> Any:
    """Filter and normalise variants, (variants, samples) uint8, NumPy or CuPy.

    Each row of the result has mean 0, or is 0 if it is filtered.
    """
    xp = array_module("cpu" if isinstance(tile, np.ndarray) else "cuda")
    missing, p, common, known = _judge(xp, tile, max_missing, min_maf)
    kept = common & known
    out = tile - (2 * p)[:, None]
    out *= (kept / xp.sqrt(xp.where(kept, 2 * p * (1 - p), 1)))[:, None]
    out *= ~missing  # several times faster than an assignment by mask
    return out


def _count(block: Any, *, max_missing: float, min_maf: float, device: Device) -> NDArray[np.int64]:
    """Count the variants of a chunk: kept, missing too often, too rare."""
    out = np.zeros((1, 3), np.int64)
    step = max(1, TILE_NBYTES[device] // block.shape[1])
    for start in range(0, block.shape[0], step):
        tile = block[start : start + step]
        _, _, common, known = _judge(array_module(device), tile, max_missing, min_maf)
        out += [int((common & known).sum()), int((~known).sum()), int((known & ~common).sum())]
    return out


def _judge(xp: Any, tile: Any, max_missing: float, min_maf: float) -> tuple[Any, Any, Any, Any]:
    """Return what is missing; of each row its frequency, and if it is common and known."""
    if tile.size and int(tile.max()) > MISSING:
        raise WorkloadError(
            f"there is a genotype {int(tile.max())}: they are 0, 1, 2 copies of an allele, "
            f"{MISSING} for missing"
        )
    n = tile.shape[1]
    missing = tile == MISSING
    n_missing = missing.sum(axis=1, dtype=np.int64)
    copies = tile.sum(axis=1, dtype=np.int64) - MISSING * n_missing
    alleles = 2 * (n - n_missing)
    # Quotients of integers are rounded as the thresholds are, so that what equals one is kept
    rarer = xp.minimum(copies, alleles - copies) / xp.maximum(alleles, 1)
    p = copies / xp.maximum(alleles, 1)
    return missing, p, (rarer >= min_maf) & (rarer > 0), n_missing / n <= max_missing


# --- made-up genotypes ----------------------------------------------------------------------------


def populations(n_samples: int, n_populations: int) -> NDArray[np.int64]:
    """Return the population of each sample that `write_genotypes` makes, shape (n_samples,)."""
    return np.arange(n_samples, dtype=np.int64) * n_populations // n_samples


def write_genotypes(
    path: str | os.PathLike[str],
    shape: tuple[int, int],
    *,
    rows: int,
    n_populations: int = 4,
    seed: int = 0,
) -> tuple[Any, da.Array]:
    """Make a Zarr store of genotypes (variants, samples) in chunks of so many rows.

    Computing the first result writes the chunks; the second is the sum of all genotypes.
    """
    zarr = zarr_module()
    # lz4 is read faster than zstd, zarr's default
    codec = importlib.import_module("zarr.codecs").BloscCodec(cname="lz4", shuffle="bitshuffle")
    how: dict[str, Any] = {"fill_value": MISSING, "compressors": codec, "dtype": "uint8"}
    how |= {"shape": shape, "chunks": (rows, shape[1])}
    try:
        array = zarr.create_array(os.path.abspath(path), **how)
    except (OSError, ValueError) as exc:
        raise WorkloadError(f"{path} cannot be made: {exc}") from exc
    draw = functools.partial(_draw, n_populations=n_populations, seed=seed)
    cut = da.core.normalize_chunks((rows, -1), shape)
    x = da.map_blocks(draw, chunks=cut, meta=np.empty((0, 0), np.uint8))
    return da.store(x, array, lock=False, compute=False), x.sum(dtype=np.uint64)


def _draw(*, n_populations: int, seed: int, block_info: Any) -> NDArray[np.uint8]:
    number, shape = block_info[None]["chunk-location"][0], block_info[None]["chunk-shape"]
    rng = np.random.Generator(np.random.SFC64(np.random.SeedSequence(seed, spawn_key=(number,))))
    ancestral, spread = rng.uniform(1e-4, 0.5, (shape[0], 1)), (1 - FST) / FST
    of_each = rng.beta(ancestral * spread, (1 - ancestral) * spread, (shape[0], n_populations))
    p = of_each.astype(np.float32)[:, populations(shape[1], n_populations)]
    drawn = rng.random(shape, np.float32)
    copies: NDArray[np.uint8] = (drawn < p * p).astype(np.uint8)
    copies += drawn < 1 - (1 - p) ** 2
    often = np.minimum(rng.exponential(MEAN_MISSING, (shape[0], 1)), 0.5)
    copies[rng.random(shape, np.float32) < often] = MISSING
    return copies
