#!/usr/bin/env bash
# Prints the path of an nvcc: CUDACXX if set, the one on the PATH, else one that is installed into build/cuda-toolkit from
# the pinned wheels of tools/requirements-cuda.txt (about 270 MB). Everything else goes to stderr.
#   tools/cuda_toolkit.sh [--wheels]    --wheels: those even if there is an nvcc
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" != --wheels ]; then
  [ -z "${CUDACXX:-}" ] || { echo "$CUDACXX"; exit 0; }
  command -v nvcc && exit 0
fi
python=${PYTHON:-python3}
[ -x .venv/bin/python ] && python=.venv/bin/python
target=$PWD/build/cuda-toolkit root=$PWD/build/cuda-toolkit/nvidia/cu13
if ! cmp -s tools/requirements-cuda.txt "$target/requirements.txt"; then
  rm -rf "$target"
  echo "   installing nvcc from wheels into build/cuda-toolkit" >&2
  "$python" -m pip install -q --no-deps --no-compile --target "$target" -r tools/requirements-cuda.txt >&2
  # The wheels have lib/ and versioned names only; nvcc and CMake look for lib64/ and libcudart.so.
  ln -sfn lib "$root/lib64"
  ln -sfn libcudart.so.13 "$root/lib/libcudart.so"
  cp tools/requirements-cuda.txt "$target/requirements.txt"
fi
"$root/bin/nvcc" --version >&2
echo "$root/bin/nvcc"
