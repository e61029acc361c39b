#!/usr/bin/env bash
# One task per node, started by launch/slurm_job.sh: torchrun starts NPROC ranks here.
set -euo pipefail
# Slurm signals every process of a step. USR1 would kill torchrun's agent and leave its ranks behind; TERM would make it
# kill them after 30 s. Both are for the ranks alone, which ignore USR1 until they are ready to answer it.
trap '' USR1 TERM
# A static rendezvous, since with c10d's the node that comes first is the first, whatever its number.
exec "$PYTHON" -m torch.distributed.run --nnodes "$SLURM_JOB_NUM_NODES" --node-rank "$SLURM_NODEID" \
    --nproc-per-node "$NPROC" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --max-restarts 0 \
    --signals-to-handle SIGINT --no-python launch/slurm_rank.sh "$@"
