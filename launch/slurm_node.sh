#!/usr/bin/env bash
# One task per node, started by launch/slurm_job.sh: torchrun starts NPROC ranks here.
set -euo pipefail
# Slurm signals every process of a step. USR1 would kill torchrun's agent but not its ranks; TERM would make the agent
# kill the ranks after 30 s. Only the ranks handle the two signals, once StopRequests.take_signals has been called.
trap '' USR1 TERM
# A static rendezvous: with the c10d one, nodes are numbered in the order in which they join.
exec "$PYTHON" -m torch.distributed.run --nnodes "$SLURM_JOB_NUM_NODES" --node-rank "$SLURM_NODEID" \
    --nproc-per-node "$NPROC" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --max-restarts 0 \
    --signals-to-handle SIGINT --no-python launch/slurm_rank.sh "$@"
