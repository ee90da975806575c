#!/usr/bin/env bash
# The CUDA tests on this machine's GPU, recorded in tests/reports/cuda.json (`make test-gpu`).
#   tools/test_gpu.sh [NAME]    NAME: the machine's name in the report and in bench/results (default: from the GPU)
# GPU_PYTHON is a Python with a CUDA build of torch (2.11 or later) and pytest; the C++ tests need no Python.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${GPU_PYTHON:-python3} build=build/gpu report=$PWD/build/gpu/report
query() { nvidia-smi --query-gpu="$1" --format=csv,noheader | head -n 1; }
gpu=$(query name) || { echo "no CUDA device: nvidia-smi found none"; exit 3; }
driver=$(query driver_version)
machine=${1:-$(echo "$gpu" | sed 's/^NVIDIA *//' | tr '[:upper:] ' '[:lower:]-')}

CUDACXX=$(tools/cuda_toolkit.sh)
export CUDACXX
cmake -S . -B "$build" -G Ninja -DGDN_BUILD_TESTS=ON -DGDN_BUILD_TORCH=ON "-DPython_EXECUTABLE=$(command -v "$python")" \
  -DGDN_CUDA=ON -DGDN_CUDA_ARCHITECTURES=native
cmake --build "$build" -j "${JOBS:-$(nproc)}"
tested=$(python3 tools/report_hash.py --hash cuda)

rm -rf "$report"
mkdir -p "$report"
junit=()
status=0
for test in "$build"/tests/cpp/gdn_cuda*test; do
  name=$(basename "$test")
  GDN_REPORT=$report/$name.json "$test" "--gtest_output=xml:$report/$name.xml" || status=1
  junit+=("$report/$name.xml")
done
export GDN_LIBRARY=$PWD/$build/libgdn.so GDN_TORCH_OPS=$PWD/$build/python/csrc/_torch_ops.so PYTHONPATH=$PWD/python
"$python" -m pytest tests/python/test_cuda_*.py "--junitxml=$report/python.xml" || status=1
junit+=("$report/python.xml")
shopt -s nullglob
errors=("$report"/*.json)
python3 tools/report_hash.py --record cuda --machine "$machine" --gpu "$gpu" --driver "$driver" --tested-hash "$tested" \
  --junit "${junit[@]}" --errors "${errors[@]}"
exit $status
