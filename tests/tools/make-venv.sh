#!/usr/bin/env bash
# make-venv.sh PYTHON FOLDER: a virtual environment with pip. Debian ships venv as a package of its own.
set -eu
python=$1 folder=$2
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "hpcdask needs Python 3.11 or newer, $python is $("$python" --version); choose another: make PYTHON=python3.12" >&2
    exit 1
}
make_venv() { "$python" -m venv --clear "$folder" >"$log" 2>&1; }

log=$(mktemp)
trap 'rm -f "$log"' EXIT
make_venv && exit 0

package=$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "Installing $package, without which Debian's Python makes no virtual environment"
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends "$package" >"$log" 2>&1 &&
        make_venv && exit 0
fi
# a Python that was unpacked by hand has no pip to copy, but another's can install one
"$python" -m venv --clear --without-pip "$folder" >>"$log" 2>&1 &&
    python3 -m pip --python "$folder/bin/python" install --quiet --no-input pip >>"$log" 2>&1 && exit 0
cat "$log" >&2
echo "$python -m venv failed. On Debian and Ubuntu: sudo apt-get install $package" >&2
exit 1
