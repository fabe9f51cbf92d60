#!/usr/bin/env bash
# gpu.sh FOLDER [STEP...]: what only a host with GPUs can show. Full logs and results go to FOLDER; a
# line for each step goes to standard output. Steps, in this order by default:
#   tests     tests/gpu
#   bench     all workloads at sizes that suit the GPUs, with a report
#   startup   start, transfers and Dask tasks beside the peers
#   workloads the tuned forms beside the stock ones on dask-cuda's LocalCUDACluster
# The Python of the environment comes from PATH, or from $PYTHON.
set -u
folder=$(realpath "${1:?a folder for logs and results}")
shift
mkdir -p "$folder"
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
[ $# -gt 0 ] || set -- tests bench startup workloads
failed=0

step() {
    local name=$1 start=$SECONDS
    shift
    "$@" >"$folder/$name.log" 2>&1
    local code=$?
    [ $code = 0 ] || failed=1
    printf '%-10s exit code %d, %d s: %s\n' "$name" $code $((SECONDS - start)) \
        "$(grep -v '^{' "$folder/$name.log" | tail -n 1 | cut -c1-150)"
}

peers() {
    "$python" benchmarks/peers.py --json "$folder/peers.json" --cases "$@"
}

for name in "$@"; do
    case $name in
    tests) step tests "$python" -m pytest -p no:cacheprovider tests/gpu --timeout 180 --durations 10 ;;
    bench) step bench "$python" -m hpcdask.bench all \
        --json "$folder/bench.json" --report "$folder/report.html" ;;
    startup) step startup peers startup,transfer,programs --rounds 3 \
        --programs transpose_sum.py --programs map_gather.py ;;
    workloads) step workloads peers array,svd,packed,scaling --rounds 2 ;;
    *)
        echo "gpu.sh: no step is called $name" >&2
        exit 2
        ;;
    esac
done
exit $failed
