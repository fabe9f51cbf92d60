"""A notebook that attaches to a detached cluster, computes, and is killed.

``python attached.py NAME FOLDER COUNT`` has COUNT Dask tasks computed, each of which notes in
FOLDER that it ran, publishes them as "work", and waits to be killed. ``python attached.py NAME``
collects and unpublishes them later, and prints the host's name and the results as JSON.
"""

import json
import socket
import sys
import time

import hpcdask


def work(number: int, folder: str) -> int:
    """Note that it ran; takes a moment."""
    with open(f"{folder}/{number}", "a") as file:
        file.write("x")
    time.sleep(0.05)
    return number * number


def collect(name: str) -> None:
    """Print what was published."""
    with hpcdask.attach(name) as cluster, cluster.get_client() as client:
        results = client.gather(client.get_dataset("work"))
        client.unpublish_dataset("work")
    print(json.dumps([socket.gethostname(), results]))


if __name__ == "__main__":
    name, *rest = sys.argv[1:]
    if not rest:
        collect(name)
        sys.exit()
    folder, count = rest
    client = hpcdask.attach(name).get_client()
    futures = client.map(work, range(int(count)), folder=folder)
    client.publish_dataset(work=futures)
    print("computes", flush=True)
    time.sleep(1000)
