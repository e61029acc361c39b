#!/usr/bin/env bash
# The body of every sbatch script (slurm/*.sh), for any config and any number of nodes:
#
#     launch/slurm_job.sh CONFIG.yaml [section.key=value ...]        inside a job, from the repository's root
#
# --ntasks-per-node=1: one task per node, in which torchrun starts the node's ranks.
# --ntasks-per-node=8: one task per rank, without torchrun. Both give the same ranks.
#
# From the environment that sbatch was called in:
#   NPROC    ranks per node                     [the node's GPUs, or 1]
#   PYTHON   the interpreter, on every node     [.venv/bin/python if there is one, or python3]
#   LOG_ROOT folder of the ranks' logs, on storage that all nodes share     [runs/slurm]
#
# A run that ends with 75 has saved and wants to go on: it was signalled (sbatch --signal, preemption) or its time is
# almost up (trainer.stop_before_minutes). The job is then queued again, and resumes where it was.
set -uo pipefail

if [[ $# -lt 1 || -z "${SLURM_JOB_ID:-}" ]]; then
    echo "usage, inside a Slurm job: $0 CONFIG.yaml [section.key=value ...]" >&2
    exit 2
fi
# Not the folder of $0: sbatch runs a copy of the script from its spool folder.
cd "$SLURM_SUBMIT_DIR" || exit 2
# shellcheck source=launch/env.sh
source launch/env.sh

readonly STOPPED_TO_GO_ON=75 # observability/failures.py
tasks_per_node=${SLURM_NTASKS_PER_NODE:-1}
if [[ "$tasks_per_node" -gt 1 ]]; then NPROC=$tasks_per_node; fi
export NPROC="${NPROC:-${SLURM_GPUS_ON_NODE:-1}}"
if [[ -z "${PYTHON:-}" ]]; then
    PYTHON=$(command -v "$PWD/.venv/bin/python" || command -v python3)
fi
export PYTHON
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# Below the ports that the system gives out by itself, and another one for each job that shares a node.
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export LOG_DIR="${LOG_ROOT:-$PWD/runs/slurm}/$SLURM_JOB_ID/attempt_${SLURM_RESTART_COUNT:-0}"
# srun and torchrun end with codes of their own; rank 0 writes here what the program ended with.
export RLHF_MC_EXIT_CODE_FILE="$LOG_DIR/exit_code"
mkdir -p "$LOG_DIR" || exit 2

say() { echo "slurm_job: $*" >&2; }
say "$SLURM_JOB_NUM_NODES nodes x $NPROC ranks, attempt ${SLURM_RESTART_COUNT:-0}, the first node is $MASTER_ADDR;" \
    "the ranks' logs are in $LOG_DIR"

# All CPUs of the node for its tasks: by default a step's task gets one.
cpus=$((SLURM_CPUS_ON_NODE / tasks_per_node))
step=(srun --nodes="$SLURM_JOB_NUM_NODES" --cpu-bind=none)

"${step[@]}" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 "$PYTHON" -m launch.preflight probe "$@" |
    "$PYTHON" -m launch.preflight compare "$SLURM_JOB_NUM_NODES" || exit 2

if [[ "$tasks_per_node" -gt 1 ]]; then
    program=(launch/slurm_rank.sh "$@")
else
    program=(launch/slurm_node.sh "$@")
fi
# In the background, since a trap waits for a command in the foreground, but not for `wait`. srun passes the signal on.
# Preemption sends TERM where the site does not send what --signal names.
trap 'kill -USR1 "$srun_pid" 2>/dev/null' USR1 TERM
"${step[@]}" --ntasks=$((SLURM_JOB_NUM_NODES * tasks_per_node)) --ntasks-per-node="$tasks_per_node" \
    --cpus-per-task="$cpus" --kill-on-bad-exit=1 "${program[@]}" &
srun_pid=$!
while kill -0 "$srun_pid" 2>/dev/null; do wait "$srun_pid"; done
wait "$srun_pid"
code=$?
ended_with=$(cat "$RLHF_MC_EXIT_CODE_FILE" 2>/dev/null || true)

if [[ "$ended_with" == "$STOPPED_TO_GO_ON" ]]; then
    # scancel, and a time limit that has passed, end the ranks with a signal too: such a job is not to come back.
    if [[ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" != RUNNING ]]; then
        say "the job is being ended, so it is not queued again; submitted anew, it goes on from its checkpoint"
        exit "$STOPPED_TO_GO_ON"
    fi
    say "stopped to go on later: the job is queued again"
    # This ends the script too, so nothing comes after it, unless the job may not be queued again.
    scontrol requeue "$SLURM_JOB_ID"
    exit "$STOPPED_TO_GO_ON"
fi
if [[ "$code" -ne 0 ]]; then
    code=${ended_with:-$code}
    [[ "$code" -ne 0 ]] || code=1
    say "the run ended with $code; what each rank said is in $LOG_DIR"
fi
exit "$code"
