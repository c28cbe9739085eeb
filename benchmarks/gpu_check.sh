#!/usr/bin/env bash
# Step time, tokens a second, share of the card's bf16 arithmetic and peak memory, ours beside TRL with transformers'
# generation, on random 0.6 B and 1.7 B Qwen3 models: less than 10 minutes on one GPU, offline.
#
#   benchmarks/gpu_check.sh                    on the first GPU
#   benchmarks/gpu_check.sh --device cpu       the same code on a CPU, with the 1 M model: only the device is untested then
set -euo pipefail
cd "$(dirname "$0")/.."

device=cuda
[[ "${1:-}" == "--device" ]] && device="${2:?--device takes cpu or cuda}"
python="${PYTHON:-python3}"
[[ -x .venv/bin/python ]] && python=.venv/bin/python

if [[ "$device" == cuda ]]; then
    if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
        echo "torch finds no GPU here: run this on a machine with one, or benchmarks/gpu_check.sh --device cpu" >&2
        exit 2
    fi
    "$python" -c 'import torch; print(torch.cuda.get_device_name(), "torch", torch.__version__)'
    checks=(0.6b:long-prompt 0.6b:long-tail 1.7b:long-prompt) steps=3
else
    checks=(1m:short) steps=1
fi

for check in "${checks[@]}"; do
    "$python" benchmarks/step_vs_trl.py --model "${check%:*}" --workload "${check#*:}" --device "$device" --steps "$steps"
done
