#!/usr/bin/env bash
# Unpacks the source distributions of dask-jobqueue and dask-mpi, whose tests the wheels may leave out,
# into FOLDER, by default HPCDASK_PEERS. tests/peers runs them on hpcdask. Where it cannot be had, that skips, or
# fails with CI=true, and says why.
set -eu
python=${1:-python3}
folder=${2:-${HPCDASK_PEERS:-${XDG_CACHE_HOME:-$HOME/.cache}/hpcdask-peers}}
peers="dask-jobqueue==0.9.0 dask-mpi==2026.3.0"
[ "$(cat "$folder/complete" 2>/dev/null)" != "$peers" ] || exit 0
echo "Unpacking the tests of $peers into $folder"
mkdir -p "$(dirname "$folder")"
new=$(mktemp -d "$folder.XXXXXX")
trap 'rm -rf "$new"' EXIT
# shellcheck disable=SC2086
"$python" -m pip download --quiet --disable-pip-version-check --no-input --no-deps --dest "$new" \
    --no-binary dask-jobqueue,dask-mpi $peers >"$new/log" 2>&1 </dev/null || {
    tail -n 5 "$new/log"
    echo "The tests of dask-jobqueue and dask-mpi are not here: pip download failed"
    exit 0
}
for file in "$new"/*.tar.gz; do
    tar -xzf "$file" -C "$new" --no-same-owner
done
mv "$new"/dask_jobqueue-*/ "$new/dask-jobqueue"
mv "$new"/dask_mpi-*/ "$new/dask-mpi"
rm -f "$new"/*.tar.gz "$new/log"
echo "$peers" >"$new/complete"
chmod 755 "$new"
rm -rf "$folder"
mv -T "$new" "$folder" 2>/dev/null || true # somebody else was faster
