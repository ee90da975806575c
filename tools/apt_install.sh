#!/usr/bin/env bash
# Installs the Debian packages of the named groups (tools/apt_packages.txt) that are missing; does nothing when none is.
#   tools/apt_install.sh build test
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
wanted=()
for group in "$@"; do
  mapfile -t -O "${#wanted[@]}" wanted < <(awk -v g="$group" '$1 == g {print $2}' "$here/apt_packages.txt")
done

if ! command -v dpkg-query >/dev/null; then
  echo "   this is no Debian system: these must be there (by whatever name they have here): ${wanted[*]}"
  exit 0
fi
python=${PYTHON:-python3}
has_headers='import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))'
missing=()
for package in "${wanted[@]}"; do
  # A python3 from elsewhere (pyenv, conda) brings its own venv and headers.
  [ "$package" = python3-venv ] && "$python" -c 'import ensurepip, venv' 2>/dev/null && continue
  [ "$package" = python3-dev ] && "$python" -c "$has_headers" 2>/dev/null && continue
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing+=("$package")
done
[ ${#missing[@]} -gt 0 ] || exit 0

sudo=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "   missing, and neither root nor sudo to install them: ${missing[*]}"; exit 1; }
  sudo=(sudo)
fi
echo "   installing Debian packages: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
install=("${sudo[@]}" apt-get install -y --no-install-recommends "${missing[@]}")
# Package lists may be absent or old on a fresh machine.
"${sudo[@]}" apt-get update -qq || echo "   apt-get update failed; trying with the lists at hand"
"${install[@]}" </dev/null
