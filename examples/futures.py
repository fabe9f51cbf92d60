"""Own functions with futures: count primes by their last digit, merged on the workers as they come.

mpirun -n 4 python -m hpcdask.run examples/futures.py
"""

import sys
from collections import Counter

import numpy as np
from distributed import Client, as_completed

LIMIT, STEP, AT_ONCE = 4_000_000, 100_000, 8
EXPECTED = {1: 70779, 2: 1, 3: 70819, 5: 1, 7: 70793, 9: 70753}


def count_primes(start: int) -> Counter:
    """Sieve one interval, and count its primes by their last digit."""
    numbers = np.arange(start, min(start + STEP, LIMIT))
    is_prime = numbers > 1
    for d in range(2, int(LIMIT**0.5) + 1):
        first = max(d * d, -(-start // d) * d)
        is_prime[first - start :: d] = False
    digits, counts = np.unique(numbers[is_prime] % 10, return_counts=True)
    return Counter(dict(zip(digits.tolist(), counts.tolist(), strict=True)))


def merge(counters: list[Counter]) -> Counter:
    """Add counters."""
    return sum(counters, Counter())


client = Client()
coming = as_completed(client.map(count_primes, range(0, LIMIT, STEP)))
waiting = []
for future in coming:
    waiting.append(future)
    # What is done is merged where it lies; the sum counts as one more result that will come.
    if len(waiting) == AT_ONCE:
        coming.add(client.submit(merge, waiting))
        waiting = []
found = client.submit(merge, waiting).result()

n_workers = len(client.nthreads())
print(
    f"{sum(found.values())} primes below {LIMIT}, on {n_workers} workers: {sorted(found.items())}"
)
if found != EXPECTED:
    sys.exit(f"wrong: {sorted(EXPECTED.items())} was expected")
