#!/usr/bin/env bash
# Python with this package on one machine, in the site's container if it has one (launch/site.example.ini):
#
#     launch/tool.sh tools/prepare_data.py --dataset gsm8k --input DIR --output DIR
#     launch/tool.sh -m rlhf_mc.planner CONFIG.yaml --nodes 8
#     launch/tool.sh -m torch.distributed.run --standalone --nproc-per-node 8 tools/convert_hf_to_mcore.py ...
#
# A container of pyxis is a step of srun: in the current job, otherwise in a job of its own, for which srun reads
# SLURM_ACCOUNT, SLURM_PARTITION and the like.
set -euo pipefail
launch=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/env.sh
source "$launch/env.sh"
step=()
if [[ "${RLHF_MC_CONTAINER:-}" == pyxis ]]; then step=(srun --nodes=1 --ntasks=1 "${site_srun[@]}"); fi
exec "${step[@]}" "${site_wrapper[@]}" "$launch/python.sh" "$@"
