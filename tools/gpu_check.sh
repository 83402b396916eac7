#!/usr/bin/env bash
# The checks and the benchmark of the log-prob head on one GPU, in a few minutes: needs torch for a GPU, megatron-core and
# pytest. Results go to the folder $1 (default: docs/benchmarks).
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD"
python -m pytest -q tests/gpu
python tools/bench_head.py --shape 8192,4096,151936 8192,4096,18992 --rounds 5 --out "${1:-docs/benchmarks}"
