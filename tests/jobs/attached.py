"""A notebook that attaches to a detached cluster, computes, and is killed.

``python attached.py NAME FOLDER COUNT`` has COUNT Dask tasks computed, each of which notes in
FOLDER that it ran, publishes them as "work", and waits to be killed.
"""

import sys
import time

import hpcdask


def work(number: int, folder: str) -> int:
    """Note that it ran; takes a moment."""
    with open(f"{folder}/{number}", "a") as file:
        file.write("x")
    time.sleep(0.05)
    return number * number


if __name__ == "__main__":
    name, folder, count = sys.argv[1:]
    client = hpcdask.attach(name).get_client()
    futures = client.map(work, range(int(count)), folder=folder)
    client.publish_dataset(work=futures)
    print("computes", flush=True)
    time.sleep(1000)
