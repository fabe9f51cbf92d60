"""Turns with an actor, each waiting for the result of its method (1,000)."""

import common


class Counter:
    def __init__(self):
        self.count = 0

    def increment(self):
        self.count += 1
        return self.count


if __name__ == "__main__":
    options = common.start(count=1_000)

    def run():
        counter = options.client.submit(Counter, actor=True, pure=False).result()
        return [counter.increment().result() for _ in range(options.count)]

    options.measure(run, lambda counts: counts == list(range(1, options.count + 1)))
