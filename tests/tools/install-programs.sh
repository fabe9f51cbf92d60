#!/usr/bin/env bash
# Installs SLURM, munge, MariaDB, for SLURM's accounting, Chromium, to look at reports, and what small
# systems lack (ip, unshare, g++), from the distribution where that is allowed (root, or sudo without
# a password) and starts none of their services: the tests start daemons of their own.
# Where it is not allowed, the tests that need them skip, or fail with CI=true, and say why.
set -eu
PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
packages=
for program in munged slurmctld slurmd srun sbatch slurmdbd mariadbd mariadb-install-db; do
    if ! command -v $program >/dev/null; then
        packages="slurmctld slurmd slurm-client munge slurmdbd mariadb-server-core mariadb-client-core"
    fi
done
command -v ip >/dev/null || packages="$packages iproute2"
command -v unshare >/dev/null || packages="$packages util-linux"
command -v g++ >/dev/null || packages="$packages g++"
browser=
command -v chromium >/dev/null || command -v google-chrome >/dev/null || browser=chromium
[ -n "$packages$browser" ] || exit 0

give_up() { echo "Not installed ($1): $packages $browser"; exit 0; }
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

log=$(mktemp)
quietly() { "$@" >"$log" 2>&1 </dev/null || { tail -n 20 "$log"; rm -f "$log"; give_up "apt-get failed"; }; }
quietly $as_root apt-get -qq update
# Ubuntu has it as a snap only, which wants a running snapd: there the name has no candidate
if [ -n "$browser" ] && ! LC_ALL=C apt-cache policy chromium | grep -q 'Candidate: [0-9]'; then
    echo "There is no package of Chromium here: tests that look at pages want google-chrome"
    browser=
fi
packages="$packages $browser"
if [ -n "${packages// /}" ]; then
    # shellcheck disable=SC2086
    echo "Installing" $packages
    # shellcheck disable=SC2086
    quietly $as_root env DEBIAN_FRONTEND=noninteractive \
        apt-get -qq install --no-install-recommends $packages
fi
rm -f "$log"
