#!/bin/bash
# A program on GPUs of several nodes with LSF and jsrun: one Dask worker per GPU.
#
#     PROGRAM="script.py args" bsub < lsf-jsrun.sh
#
# Without a program it measures the nodes. Adapt the lines below to the site; a directive with two ##
# is off. jsrun's resource set is one whole node with 6 GPUs and 42 cores here, so that the ranks of a
# node see each other's GPUs, which NVLink needs. Sites without jsrun take
# #BSUB -n 12, -R "span[ptile=6]", -gpu "num=6", and mpirun -n 12.
##BSUB -q gpu
#BSUB -P abc
#BSUB -J dask
#BSUB -nnodes 2
#BSUB -W 1:00
#BSUB -o dask-%J.log
set -e

# module load cuda; source ~/venv/bin/activate

exec jsrun --nrs 2 --rs_per_host 1 --tasks_per_rs 6 --gpu_per_rs 6 --cpu_per_rs 42 --bind none \
    python -m hpcdask.run ${HPCDASK_OPTIONS:-} ${PROGRAM:--m hpcdask.bench array}
