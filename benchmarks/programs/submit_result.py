"""Turns of `client.submit` and `result`, each with the result before (1,000)."""

import common


def increment(number):
    return number + 1


if __name__ == "__main__":
    options = common.start(count=1_000)

    def run():
        number = 0
        for _ in range(options.count):
            number = options.client.submit(increment, number, pure=False).result()
        return number

    options.measure(run, lambda number: number == options.count)
