"""`da.linalg.svd_compressed(x, k=10)` of persisted bytes."""

import common
import dask
import dask.array as da

if __name__ == "__main__":
    options = common.start()
    shape = options.pick(gpu=(1_000_000, 20_000), cpu=(8_000, 2_000))
    chunks = options.pick(gpu=(20_000, 5_000), cpu=(2_000, 500))

    def prepare():
        numbers = options.random.randint(0, 3, size=shape, chunks=chunks, dtype="uint8")
        return options.persist(numbers)

    def run(x):
        u, s, v = da.linalg.svd_compressed(x, k=10, seed=options.random)
        return u.shape, *dask.compute(s, v)

    def check(result):
        u_shape, s, v = result
        size = float(s[0]) / (shape[0] * shape[1]) ** 0.5  # about the mean of the bytes, 1
        orthogonal = abs(float((v @ v.T).trace()) - 10) < 1e-6
        return orthogonal and 0.9 < size < 1.01 and u_shape == (shape[0], 10)

    options.measure(run, check, prepare, nbytes=shape[0] * shape[1])
