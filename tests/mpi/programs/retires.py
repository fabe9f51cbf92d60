"""Retires all workers and goes on without, until it is told to end."""

import sys

from distributed import Client

client = Client()
client.retire_workers(list(client.scheduler_info()["workers"]))
print("retired", flush=True)
sys.stdin.readline()
