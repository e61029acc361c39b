# shellcheck shell=bash
# Environment variables that must be set before Python starts, and the site file's settings (launch/site.sh); every
# launcher sources this file. Values that are set already stay.
# shellcheck source=launch/site.sh
source "$(dirname "${BASH_SOURCE[0]}")/site.sh"
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=${site_python:-$(command -v "$site_root/.venv/bin/python" || command -v python3)}
fi
export PYTHON
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Models are local directories; nothing is downloaded during a run.
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"
# torchrun would set 1: after an error NCCL's operations are aborted before the process, which computes on with what they
# have left in memory. 3 is torch's own default, which ends the process at once.
export TORCH_NCCL_ASYNC_ERROR_HANDLING="${TORCH_NCCL_ASYNC_ERROR_HANDLING:-3}"
# The soft limit on open files is raised to the hard one: a rank has connections to every other (docs/cluster.md).
ulimit -S -n "$(ulimit -H -n)" 2>/dev/null || true
# The interface of both libraries, where a node has several. gloo takes a name, NCCL a prefix unless it begins with "=".
if [[ -n "${RLHF_MC_SOCKET_IFNAME:-}" ]]; then
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$RLHF_MC_SOCKET_IFNAME}"
    export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-=$RLHF_MC_SOCKET_IFNAME}"
fi
# What Triton, Inductor, vLLM and FlashInfer compile stays on the node: in a home directory on shared storage every rank of
# a job would compile and lock there. Each lock file has a folder of its own.
if [[ -z "${RLHF_MC_CACHE:-}" ]]; then
    RLHF_MC_CACHE=/tmp/rlhf_mc_$UID/$(cksum <"$site_root/requirements/gpu.txt" | cut -d " " -f 1)
fi
export RLHF_MC_CACHE
export TRITON_CACHE_DIR="${TRITON_CACHE_DIR:-$RLHF_MC_CACHE/triton}"
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$RLHF_MC_CACHE/inductor}"
export VLLM_CACHE_ROOT="${VLLM_CACHE_ROOT:-$RLHF_MC_CACHE/vllm}"
# It gets a folder .cache/flashinfer.
export FLASHINFER_WORKSPACE_BASE="${FLASHINFER_WORKSPACE_BASE:-$RLHF_MC_CACHE}"
