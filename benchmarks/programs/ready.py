"""From the launch of the command to a client with all workers."""

import common
from distributed.diagnostics.nvml import has_cuda_context


def has_context():
    return bool(has_cuda_context().has_context)


if __name__ == "__main__":
    options = common.start(contexts=0)  # 1: workers have to have CUDA contexts
    seconds = common.since_launch()
    ready = len(options.client.nthreads()) >= options.workers
    if options.contexts:
        ready = ready and all(options.client.run(has_context).values())
    common.report(seconds, ready)
