"""Prints the addresses that the parts of the cluster listen on."""

import json

import psutil
from distributed import Client


def listening(**kwargs: object) -> list[str]:
    found = psutil.Process().net_connections("tcp")
    return sorted({c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN})


client = Client()
parts = list(client.run(listening).values())
parts += client.run(listening, nanny=True).values()
parts.append(client.run_on_scheduler(listening))
print("facts", json.dumps(parts))
