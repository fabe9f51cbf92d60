"""Prints OMP_NUM_THREADS of the workers and of the program."""

import json
import os

from distributed import Client


def limit() -> str | None:
    return os.environ.get("OMP_NUM_THREADS")


client = Client()
found = client.run(limit)
print("facts", json.dumps([sorted(set(found.values())), limit()]))
