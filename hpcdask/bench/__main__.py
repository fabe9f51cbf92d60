"""``python -m hpcdask.bench``: what ``hpcdask bench`` is, as the program of a runner."""

from hpcdask.bench.command import main

if __name__ == "__main__":
    raise SystemExit(main())
