#!/usr/bin/env bash
# One node, one process per GPU (or NPROC processes):
#
#     launch/torchrun_1node.sh CONFIG.yaml [section.key=value ...]
#
# NPROC=2 launch/torchrun_1node.sh configs/quickstart.yaml     two processes on a CPU
set -euo pipefail

if [[ $# -lt 1 ]]; then
    echo "usage: [NPROC=n] $0 CONFIG.yaml [section.key=value ...]" >&2
    exit 2
fi

if [[ -z "${NPROC:-}" ]]; then
    NPROC=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
    [[ "$NPROC" -gt 0 ]] || NPROC=1
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Megatron overlaps tensor-parallel communication with computation only if kernels start in the order they were issued.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
# A model is a directory here; nothing is fetched during a run.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"

exec torchrun --standalone --nproc-per-node "$NPROC" -m rlhf_mc "$@"
