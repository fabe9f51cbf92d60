#!/usr/bin/env bash
# Unpacks Grid Engine and OAR into folders of their own, FOLDER/sge and FOLDER/oar: neither is needed
# on the system. The default FOLDER is .queues beside the environment of `make venv`; HPCDASK_QUEUES
# names another. Where they cannot be had, tests that need them skip, or fail with CI=true, and say why.
set -eu
folder=${1:-${HPCDASK_QUEUES:-$PWD/.queues}}
sge="gridengine-master gridengine-exec gridengine-client gridengine-common"
oar="oar-server oar-user oar-common liboar-perl libdbi-perl libdbd-mysql-perl libjson-perl libsort-versions-perl"
kinds="sge oar"
[ "$(cat "$folder/complete" 2>/dev/null)" != "$kinds" ] || exit 0

give_up() { echo "The commands of Grid Engine and OAR are not installed ($1)"; exit 0; }
command -v apt-get >/dev/null && command -v dpkg >/dev/null || give_up "no apt-get here"
packages=$(mktemp -d)
trap 'rm -rf "$packages"' EXIT

echo "Unpacking the commands of Grid Engine and OAR into $folder"
# Libraries have other names in each release
libraries() {
    apt-cache depends gridengine-exec |
        sed -nE 's/^ *Depends: (lib(jemalloc|munge|hwloc|tirpc)[0-9a-z]*)$/\1/p'
}
# Not every distribution has it
oar_here() { ! apt-cache show oar-server >/dev/null 2>&1 || echo "$oar"; }
# Root's apt-get would download as a user who cannot write here; others need no such word
# shellcheck disable=SC2086
download() {
    sge="$sge $(libraries)"
    (cd "$packages" && apt-get -qq -o APT::Sandbox::User=root download $sge $(oar_here))
}
update() { if [ "$(id -u)" = 0 ]; then apt-get -qq update; else sudo -n apt-get -qq update; fi; }
{ download || { update && download; }; } >"$packages/log" 2>&1 </dev/null || {
    tail -n 20 "$packages/log"
    give_up "apt-get download failed"
}
for kind in $kinds; do
    rm -rf "${folder:?}/$kind"
    mkdir -p "$folder/$kind"
    for package in ${!kind}; do
        for file in "$packages/$package"_*.deb; do
            [ ! -e "$file" ] || dpkg -x "$file" "$folder/$kind"
        done
    done
done
# Grid Engine loads its spooling library from one folder; without one, the loader's path counts
for program in sge_qmaster spoolinit spooldefaults.bin; do
    perl -0777 -pi -e 's{/usr/lib/gridengine/%s%s\0}{"%s%s" . "\0" x 21}ge' \
        "$folder/sge/usr/lib/gridengine/$program"
done
echo "$kinds" >"$folder/complete"
