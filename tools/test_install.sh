#!/usr/bin/env bash
# Installs a build into an empty folder and builds examples/cmake_project against the copy, with find_package and with
# pkg-config; runs what was built. The copy is moved once, so that an absolute path anywhere in it shows.
#   tools/test_install.sh <build folder> <cmake> <cc> <cxx>
set -euo pipefail
build=$1 cmake=$2 cc=$3 cxx=$4
source=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$cmake" --install "$build" --prefix "$work/first" >/dev/null
mv "$work/first" "$work/prefix"
for file in include/gdn/gdn.h include/gdn/gdn.hpp; do
  [ -f "$work/prefix/$file" ] || { echo "not installed: $file"; exit 1; }
done
if grep -rIl "$source\|$work/first" "$work/prefix"; then
  echo "the files above name a folder of the build"; exit 1
fi

echo "-- find_package(gdn)"
"$cmake" -S "$source/examples/cmake_project" -B "$work/build" -DCMAKE_PREFIX_PATH="$work/prefix" \
  -DCMAKE_C_COMPILER="$cc" -DCMAKE_CXX_COMPILER="$cxx" >/dev/null
"$cmake" --build "$work/build" >/dev/null
"$work/build/prefill_cpp"
"$work/build/conv_c"
grep -q "^gdn_DIR:PATH=$work/prefix/" "$work/build/CMakeCache.txt" || { echo "another libgdn was found:"; grep gdn_DIR "$work/build/CMakeCache.txt"; exit 1; }

echo "-- pkg-config"
pc=$(find "$work/prefix" -name gdn.pc)
export PKG_CONFIG_PATH=${pc%/*}
pkg-config --exists 'gdn >= 0.1.0'
libdir=$(pkg-config --variable=libdir gdn)
# shellcheck disable=SC2046
"$cxx" -std=c++20 "$source/examples/cmake_project/prefill.cpp" -o "$work/pc_cpp" $(pkg-config --cflags --libs gdn)
# shellcheck disable=SC2046
"$cc" "$source/examples/cmake_project/conv.c" -o "$work/pc_c" $(pkg-config --cflags --libs gdn)
LD_LIBRARY_PATH=$libdir "$work/pc_cpp"
LD_LIBRARY_PATH=$libdir "$work/pc_c"
