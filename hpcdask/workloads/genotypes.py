"""Population structure of genotypes in a Zarr store: load, filter, normalise, decompose.

This is the genomics behind the Dask blog's "Large SVDs" (May 2020,
https://blog.dask.org/2020/05/13/large-svds). A row is a variant, a column a sample, an element how
many copies of an allele the sample has: 0, 1, 2, or 3 where that is missing.

Notes
-----
The normalisation is that of Patterson, Price and Reich, PLoS Genetics 2 (2006), e190, equation 3,
with missing genotypes at the mean of their variant: less the mean, divided by the square root of
2p(1 - p) with the allele's frequency p, which is the standard deviation in equilibrium. (The paper
divides by √(p(1 - p)); that multiplies all singular values by √2.) A variant that is filtered is a
row of zeros: it adds nothing to the singular vectors of samples, and shapes stay known.
"""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

import dask.array as da
import numpy as np
from numpy.typing import DTypeLike, NDArray

from hpcdask.workloads import Device, WorkloadError, array_module, check_device, sum_of_chunks
from hpcdask.workloads.svd import svd_rows
from hpcdask.workloads.zarr import find, open_rows

MISSING = 3
MAX_MISSING = 0.1
MIN_MAF = 0.01
TILE_NBYTES: dict[Device, int] = {"cuda": 1 << 28, "cpu": 1 << 20}


class Structure(NamedTuple):
    """Population structure, from `population_structure`.

    ``s`` are k singular values, float64: the variance along axis i is ``s[i] ** 2`` over the number
    of variants kept. ``v`` are coordinates of the samples on k axes of unit length, (k, samples).
    ``variants``, int64: those kept, those dropped because too many samples miss them, and of the
    others those dropped as too rare; reading is shared if it is computed along with the others.
    """

    s: da.Array
    v: da.Array
    variants: da.Array


def population_structure(
    path: str | os.PathLike[str],
    k: int,
    *,
    n_slots: int,
    device: Device = "cuda",
    component: str | None = None,
    max_missing: float = MAX_MISSING,
    min_maf: float = MIN_MAF,
    n_power_iter: int = 0,
    dtype: DTypeLike = np.float64,
    max_nbytes: int | None = None,
) -> Structure:
    """Find the main axes of variation between samples of a stored genotype matrix.

    Parameters
    ----------
    path, component, max_nbytes
        As for `hpcdask.workloads.zarr.open_rows`; uint8, variants by samples.
    k
        Number of axes; n populations are told apart by the first n - 1.
    n_slots
        Worker threads of the cluster.
    device
        What the workers compute on.
    max_missing
        Variants with a larger fraction of missing genotypes are dropped.
    min_maf
        Variants whose rarer allele has a lower frequency are dropped, and those with one allele.
    n_power_iter
        More of them bring out axes that differ little. Without, the store is read once and never
        held as a whole; with them, the workers' memory holds it.
    dtype
        float64 or float32, of normalised tiles.

    Raises
    ------
    WorkloadError
        Before anything is computed: no such matrix, not uint8, a store that lacks chunks and gives
        them another value than 3 (missing), ``k`` or a threshold out of range. From workers: values
        above 3, and as from `hpcdask.workloads.zarr.open_rows`.
    """
    _check_thresholds(max_missing, min_maf)
    _check_store(find(path, component))
    how: dict[str, Any] = {"n_slots": n_slots, "max_nbytes": max_nbytes, "component": component}
    x = open_rows(path, device=device, **how)
    prepare = functools.partial(
        normalise, max_missing=max_missing, min_maf=min_maf, dtype=np.dtype(dtype).name
    )
    _, s, v = svd_rows(x, k, prepare=prepare, n_power_iter=n_power_iter, dtype=dtype, device=device)
    counts = count_variants(x, max_missing=max_missing, min_maf=min_maf, device=device)
    return Structure(s, v, counts)


def _check_thresholds(max_missing: float, min_maf: float) -> None:
    if not 0 <= max_missing <= 1:
        raise WorkloadError(f"max_missing={max_missing} is out of range: a fraction, 0 to 1")
    if not 0 <= min_maf <= 0.5:
        raise WorkloadError(f"min_maf={min_maf} is out of range: a frequency, 0 to 0.5")


def _check_store(array: Any) -> None:
    if array.dtype != "uint8":
        raise WorkloadError(
            f"{array.store_path} is {array.dtype}; genotypes are uint8: 0, 1, 2 copies of an "
            f"allele, {MISSING} for missing"
        )
    if array.fill_value != MISSING and array.nchunks_initialized < array.nchunks:
        raise WorkloadError(
            f"{array.store_path} lacks some of its chunks, which would be read as genotype "
            f"{array.fill_value}: write them, or the store with fill_value={MISSING} (missing)"
        )


def normalise(
    tile: Any,
    *,
    max_missing: float = MAX_MISSING,
    min_maf: float = MIN_MAF,
    dtype: DTypeLike = np.float64,
) -> Any:
    """Filter and normalise variants, (variants, samples) uint8, NumPy or CuPy.

    Each row of the result has mean 0, or is 0 if it is filtered.
    """
    xp = array_module("cpu" if isinstance(tile, np.ndarray) else "cuda")
    missing, p, common, known = _judge(xp, tile, max_missing, min_maf)
    kept = common & known
    scale = kept / xp.sqrt(xp.where(kept, 2 * p * (1 - p), 1))
    out = tile.astype(dtype)
    out -= (2 * p).astype(dtype)[:, None]
    out *= scale.astype(dtype)[:, None]
    out *= ~missing  # several times faster than an assignment by mask
    return out


def count_variants(
    x: da.Array,
    *,
    max_missing: float = MAX_MISSING,
    min_maf: float = MIN_MAF,
    device: Device = "cuda",
) -> da.Array:
    """Count the variants that `normalise` keeps and drops, as ``variants`` of `Structure`.

    One Dask task per chunk, which has full width, and a tree.
    """
    _check_thresholds(max_missing, min_maf)
    check_device(device)
    how = {"max_missing": max_missing, "min_maf": min_maf, "device": device}
    return sum_of_chunks(_count, x, n_chunks=x.numblocks[0], width=3, dtype=np.int64, **how)


def _count(block: Any, *, max_missing: float, min_maf: float, device: Device) -> NDArray[np.int64]:
    out = np.zeros((1, 3), np.int64)
    step = max(1, TILE_NBYTES[device] // block.shape[1])
    for start in range(0, block.shape[0], step):
        tile = block[start : start + step]
        _, _, common, known = _judge(array_module(device), tile, max_missing, min_maf)
        out += [int((common & known).sum()), int((~known).sum()), int((known & ~common).sum())]
    return out


def _judge(xp: Any, tile: Any, max_missing: float, min_maf: float) -> tuple[Any, Any, Any, Any]:
    """Return what is missing; of each row its frequency, and if it is common and known."""
    if tile.dtype != np.uint8:  # others may have -1 for missing
        raise WorkloadError(
            f"genotypes are {tile.dtype}, not uint8: x = x.astype('uint8'), with {MISSING} for "
            f"missing"
        )
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
