#!/usr/bin/env bash
# The checks and the benchmark of the log-prob head on one GPU, in less than four minutes. Needs torch for a GPU and what
# Triton needs itself, a C compiler; nothing is installed. With megatron-core its cross-entropies are measured too.
#
#   tools/gpu_check.sh [FOLDER]          where head.csv and head.svg go (default: docs/benchmarks)
#   DEVICE=cpu tools/gpu_check.sh ...    the same on a CPU, with small shapes: is the script in order?
#   PYTHON=/path/to/python               another interpreter
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD:$PWD/tests"
device=${DEVICE:-cuda} python=${PYTHON:-python}
case $device in
cuda)
    "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
        { echo "gpu_check.sh: error: torch sees no GPU; DEVICE=cpu checks the script itself" >&2; exit 2; }
    shapes=(8192,4096,151936 8192,4096,18992)
    ;;
cpu)
    export CUDA_VISIBLE_DEVICES=
    shapes=(128,64,4096)
    ;;
*) echo "gpu_check.sh: error: DEVICE=$device is neither cuda nor cpu" >&2; exit 2 ;;
esac
code=0
"$python" tests/head_checks.py "$device" || code=$? # what it costs is worth knowing then too
"$python" tools/bench_head.py --shape "${shapes[@]}" --rounds 5 --out "${1:-docs/benchmarks}"
exit "$code"
