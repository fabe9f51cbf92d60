"""``python -m hpcdask``: what the command ``hpcdask`` is."""

from hpcdask.cli import main

if __name__ == "__main__":
    main(prog_name="hpcdask")
