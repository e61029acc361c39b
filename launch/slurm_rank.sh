#!/usr/bin/env bash
# One rank, started by torchrun (launch/slurm_node.sh) or by srun (one task per rank). Its output goes to the job's log
# and to a file of its own, named by rank and node.
set -euo pipefail
# Not by RANK: a hook of enroot sets RANK and WORLD_SIZE in some images.
if [[ -z "${TORCHELASTIC_RUN_ID:-}" ]]; then
    export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID LOCAL_WORLD_SIZE=$NPROC
fi
log=$LOG_DIR/rank_$(printf %04d "$RANK").$SLURMD_NODENAME.log
# Slurm signals every process of a step. A rank ignores the signals until StopRequests.take_signals handles them. tee,
# which writes the log, ignores them to the end.
trap '' USR1 TERM
exec "$PYTHON" -m rlhf_mc "$@" \
    > >(trap '' TERM INT; exec tee -a "$log") 2> >(trap '' TERM INT; exec tee -a "$log" >&2)
