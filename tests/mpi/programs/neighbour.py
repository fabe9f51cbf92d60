"""A module beside a script."""


def triple(x: int) -> int:
    return 3 * x
