#!/usr/bin/env bash
# second-python.sh PYTHON: another Python that hpcdask promises, newest first.
# Prints nothing where there is none.
main=$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
for version in 3.14 3.13 3.12 3.11; do
    [ "$version" = "$main" ] && continue
    python=$(bash "$(dirname "$0")/find-python.sh" $version)
    # make-venv.sh wants pip, too
    if [ -n "$python" ] && "$python" -c 'import ensurepip' 2>/dev/null; then
        echo "$python"
        exit 0
    fi
done
