# shellcheck shell=bash
# Environment variables that must be set before Python starts; every launcher sources this file. Values that are set
# already stay.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Megatron overlaps tensor-parallel communication with computation only if kernels start in the order they were issued.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
# Models are local directories; nothing is downloaded during a run.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
