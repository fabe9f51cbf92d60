#!/usr/bin/env bash
# dist.sh PYTHON: the source distribution and the wheel, in dist.
set -eu
[ -x .venv/bin/python ] || bash tests/tools/make-venv.sh "$1" .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-input build
out=$(.venv/bin/python -m build --outdir dist . 2>&1) || { echo "$out"; exit 1; }
ls dist/hpcdask-*.tar.gz dist/hpcdask-*.whl
