#!/usr/bin/env bash
# second-python.sh PYTHON: another Python that hpcdask promises, on PATH or of pyenv, newest first.
# Prints nothing where there is none.
main=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
for version in 3.14 3.13 3.12 3.11; do
    [ "$version" = "$main" ] && continue
    for python in "$(command -v python$version)" "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version".*/bin/python; do
        # pyenv's shims are there for versions that are not chosen, and fail
        if [ "$("$python" -c 'import ensurepip, sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$version" ]; then
            echo "$python"
            exit 0
        fi
    done
done
