"""Retires all workers and goes on without, until it is told to end."""

import sys

from common import addresses, show
from distributed import Client

client = Client()
show("listens", addresses(client))
client.retire_workers(list(client.nthreads()))
print("retired", flush=True)
sys.stdin.readline()
