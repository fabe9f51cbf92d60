"""The small matrices in the SVD of a tall one, decomposed on the host of one worker.

Sums, `Basis` and `Part` are those of `hpcdask.workloads.tall`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from hpcdask.workloads import WorkloadError, to_host
from hpcdask.workloads.tall import Basis, Floats, Rows, basis_of, only


class Solution(NamedTuple):
    """Singular values (k,), right vectors (k, n), and what makes left vectors of a chunk.

    ``right`` (n, k) makes them of the rows of A. From QR, it makes Yᵢ of them, and the chunk's own
    matrix in ``of_chunks``, by its first row, makes left vectors of Qᵢ.
    """

    s: Floats
    v: Floats
    right: Any
    of_chunks: dict[int, Floats]


def orthonormal(sums: Any, *, rows: Rows, m: int) -> Basis:
    """Return the basis of the next power iteration."""
    z, gram, y_sums, _ = only(sums)
    _refuse_underflow(gram, y_sums, rows.work)
    q, r = np.linalg.qr(to_host(gram if z is None else z))
    if len(r) > m:  # what is past the rank of A is rounding, and must not be taken for its range
        q = q @ np.linalg.svd(r)[0][:, :m]
    return q, False


def _refuse_underflow(gram: Any, y_sums: Any, work: str) -> None:
    """Refuse sums of squares of which the smallest float has taken a part."""
    kind = np.finfo(work)
    # Of float32 the squares are float64, and Y itself is at the limit
    least = float(kind.tiny) / float(kind.eps)
    least **= 1 if work == "float64" else 2
    squares = to_host(gram).diagonal()
    if squares.max() < least and (squares.any() or to_host(y_sums).any()):
        raise WorkloadError(f"x is not zero, but its products underflow in {work}: scale x")


def precondition(
    sums: Any, basis: Any = None, *, rows: Rows, width: int, seed: int | None
) -> Basis:
    """Return a basis with which the columns of Y are orthonormal but for rounding.

    Where the Gram matrix is too ill-conditioned for that, the basis stays, for QR.
    """
    matrix = _host_basis(basis, rows, width, seed)
    whiten, complete = _whiten(to_host(only(sums)[1]), rows.work)
    if not complete:
        return matrix, True
    return (whiten if matrix is None else matrix @ whiten), False


def _host_basis(basis: Any, rows: Rows, width: int, seed: int | None) -> Any:
    matrix, _ = basis_of(basis, replace(rows, device="cpu"), width, seed)
    return None if matrix is None else matrix.astype(rows.work, copy=False)


def _whiten(gram: Floats, work: str) -> tuple[Floats, bool]:
    """Return T with TᵀGT = 1 on what is above rounding, and whether that is all."""
    norms = np.sqrt(np.diag(gram))
    # What lies below is rounding of the products, not part of the range of A: a column that Ω has
    # outside the rows' space of A, or a direction in which the columns of Y depend on each other.
    noise = 64 * len(gram) * np.finfo(work).eps
    scale = np.divide(1, norms, where=norms > noise * norms.max(), out=np.zeros_like(norms))
    values, vectors = np.linalg.eigh(gram * scale * scale[:, None])
    keep = values > max(noise * values[-1], np.finfo(np.float64).tiny)
    return vectors[:, keep] / np.sqrt(values[keep]) * scale[:, None], bool(keep.all())


def solve(
    sums: Any,
    basis: Any = None,
    *,
    k: int,
    rows: Rows,
    width: int,
    seed: int | None,
    sign_of_left: bool,
) -> Solution:
    """Decompose the small matrix B, on the host, and choose the signs.

    The sums of the left vectors, or else those of the right ones, are not negative.
    """
    z, gram, y_sums, parts = only(sums)
    matrix = _host_basis(basis, rows, width, seed)
    if parts:
        q, r = np.linalg.qr(np.concatenate([part.r for part in parts]))
        ends = np.cumsum([len(part.r) for part in parts])[:-1]
        of_chunks = dict(zip((part.first for part in parts), np.split(q, ends), strict=True))
        small = r if matrix is None else sum(of_chunks[p.first].T @ p.c for p in parts)
        sums_of_q = sum(part.q_sums @ of_chunks[part.first] for part in parts)
    else:
        _refuse_underflow(gram, y_sums, rows.work)
        whiten, _ = _whiten(to_host(gram), rows.work)
        of_chunks, small = {}, (to_host(gram if z is None else z) @ whiten).T
        sums_of_q = to_host(y_sums) @ whiten
    turn, s, v = np.linalg.svd(small, full_matrices=False)
    turn, s, v = turn[:, :k], s[:k], v[:k]
    sign = np.where((sums_of_q @ turn if sign_of_left else v.sum(axis=1)) < 0, -1.0, 1.0)
    turn, v = turn * sign, v * sign[:, None]
    if parts:
        return Solution(s, v, matrix, {first: w @ turn for first, w in of_chunks.items()})
    right = whiten @ turn if matrix is None else matrix @ (whiten @ turn)
    return Solution(_fill(s, k), _fill(v, k), _fill(right.T, k).T, {})


def _fill(part: Floats, k: int) -> Floats:
    """Add zeros for what is past the rank."""
    out = np.zeros((k, *part.shape[1:]))
    out[: len(part)] = part
    return out
