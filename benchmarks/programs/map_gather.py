"""`client.map` of a function, and `client.gather` of the results (10,000)."""

import common


def double(number):
    return 2 * number


if __name__ == "__main__":
    options = common.start(count=10_000)
    client = options.client

    def run():
        return client.gather(client.map(double, range(options.count), pure=False))

    options.measure(run, lambda results: results == list(range(0, 2 * options.count, 2)))
