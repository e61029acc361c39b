# shellcheck shell=bash
# Sourced by every launcher: what must stand in the environment before Python starts. Values that are set already stay.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Megatron overlaps tensor-parallel communication with computation only if kernels start in the order they were issued.
export CUDA_DEVICE_MAX_CONNECTIONS="${CUDA_DEVICE_MAX_CONNECTIONS:-1}"
# A model is a directory here; nothing is fetched during a run.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
