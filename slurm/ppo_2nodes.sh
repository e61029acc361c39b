#!/usr/bin/env bash
# PPO on 2 nodes of 8 GPUs, with any config (by default Qwen2.5 32B on MATH). From the repository's root:
#
#     sbatch slurm/ppo_2nodes.sh [CONFIG.yaml] [section.key=value ...]
#     sbatch --nodes=4 slurm/ppo_2nodes.sh ...
#     MAX_RESTARTS=3 sbatch slurm/ppo_2nodes.sh ...          requeue it after a crash, up to 3 times
#
# Account, partition and the like are the site's: `sbatch --partition=... slurm/ppo_2nodes.sh`.
#SBATCH --job-name=ppo_2nodes
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
# 20 minutes before the time is up: finish the step, save, requeue. More than trainer.preemption_grace_seconds.
#SBATCH --signal=B:USR1@1200
#SBATCH --requeue
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
config=(configs/ppo_qwen2.5_32b.yaml)
if [[ "${1:-}" == *.yaml ]]; then config=(); fi
exec "${SLURM_SUBMIT_DIR:?submit this with sbatch}/launch/slurm_job.sh" "${config[@]}" "$@"
