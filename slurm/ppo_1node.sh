#!/usr/bin/env bash
# PPO on one node, with any config (by default Qwen2.5 0.5B on GSM8K). From the repository's root:
#
#     sbatch slurm/ppo_1node.sh [CONFIG.yaml] [section.key=value ...]
#     sbatch --gpus-per-node=4 slurm/ppo_1node.sh ...
#     MAX_RESTARTS=3 sbatch slurm/ppo_1node.sh ...           requeue it after a crash, up to 3 times
#
# Account, partition and the like are the site's: `sbatch --partition=... slurm/ppo_1node.sh`.
#SBATCH --job-name=ppo_1node
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=12:00:00
# 10 minutes before the time is up: finish the step, save, requeue. More than trainer.preemption_grace_seconds.
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
config=(configs/ppo_qwen2.5_0.5b.yaml)
if [[ "${1:-}" == *.yaml ]]; then config=(); fi
exec "${SLURM_SUBMIT_DIR:?submit this with sbatch}/launch/slurm_job.sh" "${config[@]}" "$@"
