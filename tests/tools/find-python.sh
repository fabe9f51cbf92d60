#!/usr/bin/env bash
# find-python.sh VERSION, such as 3.14: where it is, on PATH, of pyenv, or in .python-VERSION, where
# unpack-python.sh puts it. Prints nothing where there is none.
version=$1
for python in "$(command -v "python$version")" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python \
    "$PWD/.python-$version/usr/bin/python$version"; do
    # pyenv's shims are there for versions that are not chosen, and fail; without venv it is of no use
    if [ "$("$python" -c 'import sys, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$version" ]; then
        echo "$python"
        exit 0
    fi
done
