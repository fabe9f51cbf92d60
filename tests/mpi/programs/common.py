"""What the test programs share."""

import json
import sys
import time
from pathlib import Path


def stamp() -> None:
    """Note the time: the program ends now."""
    Path("ended").write_text(repr(time.time()))


def show(start: str, value: object) -> None:
    """Print a line that the test waits for."""
    sys.stdout.write(f"{start} {json.dumps(value)}\n")
    sys.stdout.flush()
