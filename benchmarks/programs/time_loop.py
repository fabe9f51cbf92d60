"""Ten time steps of heat on a plate: a five-point stencil, each step persisted."""

import common


def step(block):
    new = block.copy()
    around = block[:-2, 1:-1] + block[2:, 1:-1] + block[1:-1, :-2] + block[1:-1, 2:]
    new[1:-1, 1:-1] += 0.1 * (around - 4 * block[1:-1, 1:-1])
    return new


if __name__ == "__main__":
    options = common.start()
    side, chunk = options.pick(gpu=(20_000, 5_000), cpu=(1_500, 500))

    def prepare():
        return options.persist(options.random.random_sample((side, side), chunks=chunk))

    def run(x):
        heat = x
        for _ in range(10):
            heat = heat.map_overlap(step, depth=1, boundary="periodic").persist()
        options.finish(heat)
        return x, heat

    def check(result):
        x, heat = result
        same = abs(float((x.mean() - heat.mean()).compute())) < 1e-9
        return same and float((heat.std() / x.std()).compute()) < 0.9

    options.measure(run, check, prepare, nbytes=8 * side**2)
