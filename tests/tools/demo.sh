#!/usr/bin/env bash
# demo.sh BIN: the reference array and the reference SVD on the devices of this machine, with one
# rank per GPU, or two CPU ranks where there is none. A table at the end has what was measured
# beside what the hardware allows.
set -eu
bin=$1
gpus=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
if [ "$gpus" -gt 0 ]; then
    ranks=$gpus device=cuda array=$((100 * gpus))GB svd=$((10 * gpus))GB
else
    ranks=2 device=cpu array=500MB svd=250MB
fi
mpirun=("$bin/mpirun" -n "$ranks" --oversubscribe)
[ "$(id -u)" != 0 ] || mpirun+=(--allow-run-as-root)
results=$(mktemp)
trap 'rm -f "$results"' EXIT

demo() {
    local command=("${mpirun[@]}" "$bin/python" -m hpcdask.run --device "$device" "$@")
    printf '\n$ %s\n' "${command[*]}"
    "${command[@]}" --json "$results" >/dev/null # what is measured is told on standard error
}
demo -m hpcdask.bench array --size "$array"
demo -m hpcdask.bench svd --size "$svd"
"$bin/python" - "$results" <<'PYTHON'
import sys

from hpcdask.bench import compare, execution

execution.show(compare.load(sys.argv[1]))
PYTHON
cat <<'TEXT'

Each row compares a measured time with the hardware's limit: near 100 % nothing is left to gain, and a
low share says that this program waits for something else. Next, run your own program, for example
mpirun -n 2 python -m hpcdask.run script.py (docs/getting-started.md), or `hpcdask doctor` if a share is low.
TEXT
