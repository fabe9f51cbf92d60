"""What the test programs share."""

import json
import sys
from pathlib import Path

import psutil
from distributed import Client

sys.path.append(str(Path(__file__).parents[2]))
from clock import clock


def stamp() -> None:
    """Note the time: the program ends now."""
    Path("ended").write_text(repr(clock()))


def show(start: str, value: object) -> None:
    """Print a line that the test waits for."""
    sys.stdout.write(f"{start} {json.dumps(value)}\n")
    sys.stdout.flush()


def listening(**kwargs: object) -> list[str]:
    """Addresses that this process listens on."""
    found = psutil.Process().net_connections("tcp")
    return sorted({c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN})


def addresses(client: Client) -> list[list[str]]:
    """Addresses that the workers, their nannies and the scheduler listen on."""
    parts = list(client.run(listening).values())
    parts += client.run(listening, nanny=True).values()
    return [*parts, client.run_on_scheduler(listening)]
