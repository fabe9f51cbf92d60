"""Whom workers meet when they exchange, and who is slow."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest

from hpcdask.bench.exchange import judge, steps

# --- rounds, blocks -----------------------------------------------------------------------


@pytest.mark.parametrize("n", range(2, 18))
def test_all_pairs_meet_once_and_nobody_twice_in_a_step(n):
    found = steps(n)
    assert len(found) == 2 * (n - 1 + n % 2)
    met = [pair for step in found for pair in step]
    assert sorted(met) == list(permutations(range(n), 2))
    for step in found:
        busy = [worker for pair in step for worker in pair]
        assert len(busy) == len(set(busy))
    assert sorted(steps(n, alone=True)) == [[pair] for pair in sorted(met)]


@pytest.mark.parametrize("n", [33, 64, 511, 512])
def test_of_many_workers_some_pairs_are_measured(n):
    """Regression: 512 workers had 3.7 million Dask tasks."""
    found = steps(n)
    pairs = [pair for step in found for pair in step]
    assert len(set(pairs)) == len(pairs) < 1700
    assert {(j, i) for i, j in pairs} == set(pairs)
    assert all((i, i + 1) in pairs for i in range(0, n - 1, 2))
    for side in 0, 1:
        counts = np.bincount([pair[side] for pair in pairs], minlength=n)
        assert counts.min() >= 2
    for step in found:
        assert len({worker for pair in step for worker in pair}) == 2 * len(step)


def cluster(per_node, inside=200.0, between=20.0):
    """Rates, names and hosts of a cluster."""
    hosts = [f"n{node}" for node, count in enumerate(per_node) for _ in range(count)]
    rates = {
        (i, j): (inside if hosts[i] == hosts[j] else between) * (1 + 0.1 * np.sin(7 * i + 3 * j))
        for i, j in permutations(range(len(hosts)), 2)
    }
    return rates, [f"w{i}" for i in range(len(hosts))], hosts


def slowed(rates, which, factor=0.2):
    return {pair: rate * (factor if which(*pair) else 1) for pair, rate in rates.items()}


CASES = [
    ([8], lambda i, j: False, []),
    ([4, 4], lambda i, j: False, []),
    ([1] * 6, lambda i, j: False, []),
    ([8], lambda i, j: (i, j) == (2, 5), ["pair w2 -> w5 on n0: "]),
    ([8], lambda i, j: 3 in (i, j), ["worker w3 on n0 sends and receives slowly: "]),
    ([8], lambda i, j: i == 3, ["worker w3 on n0 sends slowly: "]),
    ([8], lambda i, j: j == 3, ["worker w3 on n0 receives slowly: "]),
    # Most, not all, of its pairs.
    ([8], lambda i, j: i == 3 and j < 5, ["worker w3 on n0 sends slowly: "]),
    # Of three, one that is slow touches four of the six pairs.
    ([3], lambda i, j: 1 in (i, j), ["worker w1 on n0 sends and receives slowly: "]),
    # Of two, nobody knows which is to blame.
    ([2], lambda i, j: (i, j) == (0, 1), ["pair w0 -> w1 on n0: "]),
    ([1] * 4, lambda i, j: 2 in (i, j), ["worker w2 on n2 sends and receives slowly: "]),
    ([4, 4, 4], lambda i, j: (i < 4) != (j < 4), ["node n0 sends and receives slowly: "]),
    ([4, 4, 4], lambda i, j: i < 4 <= j, ["node n0 sends slowly: "]),
    ([4, 4, 4], lambda i, j: i < 4 and j < 4, ["node n0 sends and receives slowly: "]),
    ([4, 4], lambda i, j: i < 4 <= j, ["node n0 sends slowly: ", "node n1 receives slowly: "]),
    # Two causes, and nothing said twice.
    (
        [4, 4, 4],
        lambda i, j: (i < 4) != (j < 4) or (i, j) == (9, 10),
        ["node n0 sends and receives slowly: ", "pair w9 -> w10 on n2: "],
    ),
]


@pytest.mark.parametrize(("per_node", "which", "expected"), CASES)
def test_slow_nodes_workers_and_pairs_are_named_once(per_node, which, expected):
    matrix, names, hosts = cluster(per_node)
    found = judge(slowed(matrix, which), names, hosts)
    assert [text[: len(start)] for text, start in zip(found, expected, strict=True)] == expected


def test_pairs_that_a_board_joins_otherwise_are_not_slow():
    """Two bridged pairs of GPUs: a third of the pairs is fast by design."""
    matrix, names, hosts = cluster([4], inside=20.0)
    fast = slowed(matrix, lambda i, j: i // 2 == j // 2, factor=10)
    assert not judge(fast, names, hosts)
