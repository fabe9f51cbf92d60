#!/usr/bin/env bash
# release.sh PYTHON [TARGET...]: checks the distribution that `make dist` built, and writes the notes
# of its version to dist/notes.md. TARGETs are make's, as the README says them: they run in the
# unpacked source distribution.
set -eu
python=$1
shift
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' hpcdask/__init__.py)
sdist=$PWD/dist/hpcdask-$version.tar.gz wheel=$PWD/dist/hpcdask-$version-py3-none-any.whl
notes=$PWD/dist/notes.md
[ -f "$sdist" ] && [ -f "$wheel" ] || { echo "dist has no hpcdask $version: make dist" >&2 && exit 1; }

awk -v version="$version" '/^## /{on = $2 == version; next} on' CHANGELOG.md >"$notes"
grep -q . "$notes" || { echo "CHANGELOG.md says nothing of $version" >&2 && exit 1; }
! grep -q "^## $version (not released)" CHANGELOG.md || echo "CHANGELOG.md: $version has no date yet"

folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$python" -m venv "$folder/twine"
"$folder/twine/bin/pip" install --quiet --disable-pip-version-check twine
"$folder/twine/bin/twine" check --strict "$sdist" "$wheel"

"$python" -m venv "$folder/clean"
"$folder/clean/bin/pip" install --quiet --disable-pip-version-check "$wheel"
"$folder/clean/bin/pip" check
(cd "$folder" && clean/bin/hpcdask --version && clean/bin/python -P -c "import hpcdask")

tar -xf "$sdist" -C "$folder"
for target in "$@"; do
    echo "make $target, in the source distribution"
    # this make's own settings and environments are not those of a user
    env -u MAKEFLAGS -u MAKELEVEL -u HPCDASK_OPENMPI -u HPCDASK_MPICH -u HPCDASK_QUEUES \
        make -C "$folder/hpcdask-$version" "$target"
done
echo "hpcdask $version is ready: $sdist, $wheel, $notes"
