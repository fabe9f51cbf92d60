"""Starts processes of its own by spawn, with the guard that this needs."""

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

from common import show
from distributed import Client


def square(x: int) -> int:
    return x * x


if __name__ == "__main__":
    client = Client()
    spawn = multiprocessing.get_context("spawn")
    with spawn.Pool(1) as pool:
        squares = pool.map(square, range(4))
    with ProcessPoolExecutor(1, mp_context=spawn) as executor:
        other = executor.submit(os.getpid).result() != os.getpid()
    fork = multiprocessing.get_context("fork")
    with fork.Pool(1) as pool:
        forked = pool.map(square, range(3))
    cluster = client.gather(client.map(square, range(3)))
    show("found", {"spawn": squares, "other": other, "fork": forked, "cluster": cluster})
