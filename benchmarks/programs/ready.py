"""From the launch of the command to a client with all workers."""

import common
from distributed import Client

if __name__ == "__main__":
    options = common.parse()
    client = Client()
    client.wait_for_workers(options.workers)
    seconds = common.since_launch()
    common.report(seconds, len(client.nthreads()) >= options.workers)
