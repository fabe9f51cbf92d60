#!/usr/bin/env bash
# install.sh NAME [PYTHON]: make the environment that `make NAME` needs.
#   demo, docs, test, unit  hpcdask and that extra into .venv; demo has the CUDA packages of the driver
#   mpich                   MPICH into .venv-mpich, beside Open MPI, which has a bin/mpirun too
set -eu
name=$1 python=${2:-python3}
install() { "$1/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "${@:2}"; }
extras=$name folder=.venv
case $name in
demo) extras=mpi ;;
unit) extras=mpi,unit ;;
mpich) folder=.venv-mpich ;;
esac
[ -x $folder/bin/python ] || bash tests/tools/make-venv.sh "$python" $folder
echo "Installing $name into $folder"
if [ "$name" = mpich ]; then
    install $folder 'mpich>=4.3'
    exit
fi
# The test extra has CuPy for CUDA 13, which CuPy for CUDA 12 would overwrite
cuda=$(nvidia-smi 2>/dev/null | sed -n 's/.*CUDA Version: \([0-9]*\).*/cuda\1/p')
if [ "$name" = demo ] && [ -n "$cuda" ]; then extras=$extras,$cuda; fi
install $folder --no-compile -e ".[$extras]"
# pip compiles one file after the other, and the packages' own tests too. A package's template that is
# not Python does not compile, which does no harm
$folder/bin/python -m compileall -q -j 0 -x '/(tests?|nvidia)/' $folder/lib/python3* || true
