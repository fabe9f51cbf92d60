#!/usr/bin/env bash
# Installs SLURM, munge, MariaDB, for SLURM's accounting, and Chromium, to look at reports, from the
# distribution where that is allowed (root, or sudo without a password) and starts none of their
# services: the tests start daemons of their own.
# Where it is not allowed, the tests that need them skip, or fail with CI=true, and say why.
set -eu
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
missing=
for program in munged slurmctld slurmd srun sbatch slurmdbd mariadbd mariadb-install-db \
    chromium; do
    command -v $program >/dev/null || missing="$missing $program"
done
[ -n "$missing" ] || exit 0

give_up() { echo "SLURM or Chromium is not installed ($1; missing:$missing)"; exit 0; }
command -v apt-get >/dev/null || give_up "no apt-get here"
as_root=
if [ "$(id -u)" != 0 ]; then
    sudo -n true 2>/dev/null || give_up "neither root nor sudo without a password"
    as_root=sudo
fi

# Debian's way to install daemons without starting them
policy=/usr/sbin/policy-rc.d
if [ ! -e $policy ]; then
    trap '$as_root rm -f $policy' EXIT
    printf '#!/bin/sh\nexit 101\n' | $as_root tee $policy >/dev/null
    $as_root chmod 755 $policy
fi

echo "Installing SLURM, munge, MariaDB and Chromium"
log=$(mktemp)
{
    $as_root apt-get -qq update &&
        $as_root env DEBIAN_FRONTEND=noninteractive apt-get -qq install --no-install-recommends \
            slurmctld slurmd slurm-client munge slurmdbd mariadb-server-core mariadb-client-core \
            chromium
} >"$log" 2>&1 </dev/null || { tail -n 20 "$log"; rm -f "$log"; give_up "apt-get failed"; }
rm -f "$log"
