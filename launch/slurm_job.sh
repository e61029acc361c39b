#!/usr/bin/env bash
# The body of every sbatch script (slurm/*.sh), for any config and any number of nodes:
#
#     launch/slurm_job.sh CONFIG.yaml [section.key=value ...]        inside a job, from the repository's root
#
# --ntasks-per-node=1: one task per node, in which torchrun starts the node's ranks.
# --ntasks-per-node=8: one task per rank, without torchrun. Both give the same ranks.
#
# Environment variables, read from the environment of sbatch, with their defaults in brackets:
#   NPROC         ranks per node [the node's GPUs, or 1]
#   PYTHON        the interpreter, on every node [the site file's, .venv/bin/python if there is one, or python3]
#   RLHF_MC_SITE  the site file: container, modules, further srun options (launch/site.example.ini) [site.ini, if it exists]
#   LOG_ROOT      folder of the ranks' logs, on storage that all nodes share [runs/slurm]
#   MAX_RESTARTS  number of times that a job is requeued after a crash; the crashed attempt must have written a new
#                 checkpoint [0]
#
# A run that exits with 75 was preempted (sbatch --signal, or Slurm's preemption), or its time is almost up
# (trainer.stop_before_minutes). The job is then requeued and resumes from the newest checkpoint, unless two consecutive
# attempts wrote no new one. The job exits with 0 only if rank 0 has reported that the run has finished.
set -uo pipefail

# The trap is set before anything that takes time. A site's preemption may send TERM and not the signal of --signal.
# srun passes USR1 on to the ranks.
stop="" srun_pid=""
trap 'stop=1; [[ -z "$srun_pid" ]] || kill -USR1 "$srun_pid" 2>/dev/null' USR1 TERM

if [[ $# -lt 1 || -z "${SLURM_JOB_ID:-}" ]]; then
    echo "usage, inside a Slurm job: $0 CONFIG.yaml [section.key=value ...]" >&2
    exit 2
fi
if [[ ! "${MAX_RESTARTS:=0}" =~ ^[0-9]+$ ]]; then
    echo "slurm_job: error: MAX_RESTARTS is $MAX_RESTARTS; it must be a number of restarts, 0 or more" >&2
    exit 2
fi
# Not the folder of $0: sbatch runs a copy of the script from its spool folder.
# -P: a container has the repository at this path.
cd -P "$SLURM_SUBMIT_DIR" || exit 2
# shellcheck source=launch/env.sh
source launch/env.sh
# sbatch passes its own environment on. With these variables in it every task would take itself for the same rank.
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE TORCHELASTIC_RUN_ID

readonly EXIT_REQUEUE=75 EXIT_USER_ERROR=2 EXIT_INTERRUPTED=130 # runtime/exit_codes.py
tasks_per_node=${SLURM_NTASKS_PER_NODE:-1}
if [[ "$tasks_per_node" -gt 1 ]]; then NPROC=$tasks_per_node; fi
export NPROC="${NPROC:-${SLURM_GPUS_ON_NODE:-1}}"
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
# The port is below the system's ephemeral ports, and differs between jobs that share a node.
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export LOG_DIR="${LOG_ROOT:-$PWD/runs/slurm}/$SLURM_JOB_ID/attempt_${SLURM_RESTART_COUNT:-0}"
# srun and torchrun have exit codes of their own; rank 0 writes the program's to this file.
export RLHF_MC_EXIT_CODE_FILE="$LOG_DIR/exit_code"
mkdir -p "$LOG_DIR" || exit 2

say() { echo "slurm_job: $*" >&2; }

# Every node writes its facts to a file: srun mixes the printed lines of the nodes.
preflight() {
    "${step[@]}" --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 \
        "${site_wrapper[@]}" launch/python.sh -m launch.preflight probe "$LOG_DIR" "$@"
    python_here -m launch.preflight compare "$LOG_DIR" "$SLURM_JOB_NUM_NODES"
}

# Run the interpreter once, within the container if there is one. Only srun enters a container of pyxis.
python_here() {
    if [[ "${RLHF_MC_CONTAINER:-}" == pyxis ]]; then
        "${step[@]}" --nodes=1 --ntasks=1 --ntasks-per-node=1 launch/python.sh "$@"
    else
        "${site_wrapper[@]}" launch/python.sh "$@"
    fi
}

# Print the job's state, or nothing if Slurm's controller does not answer.
state() {
    local found=""
    for _ in {1..5}; do
        found=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T 2>/dev/null)
        [[ -z "$found" ]] || break
        sleep 5
    done
    echo "$found"
}

# Succeed if neither this attempt nor the one before it wrote a new checkpoint. Each attempt that is to be requeued
# writes the name of its newest checkpoint to a file.
made_no_progress() {
    local attempt=${SLURM_RESTART_COUNT:-0} job=${LOG_DIR%/*} newest before
    newest=$(python_here -m launch.progress "$@") || return 1
    echo "$newest" >"$LOG_DIR/newest_checkpoint"
    for before in $((attempt - 1)) $((attempt - 2)); do
        [[ "$(cat "$job/attempt_$before/newest_checkpoint" 2>/dev/null)" == "$newest" ]] || return 1
    done
}

# Print why a run that exited with the given code is not restarted, or nothing if it is. Each crashed attempt that is
# restarted leaves a file.
why_no_restart() {
    local code=$1 job=${LOG_DIR%/*} crashes now newest
    shift
    crashes=$(find "$job" -mindepth 2 -maxdepth 2 -name crashed | wc -l)
    case $code in
        "$EXIT_USER_ERROR") echo "the same error would come again" && return ;;
        "$EXIT_INTERRUPTED") echo "it was interrupted" && return ;;
    esac
    if [[ "$MAX_RESTARTS" -eq 0 ]]; then echo "MAX_RESTARTS is 0" && return; fi
    if [[ "$crashes" -ge "$MAX_RESTARTS" ]]; then
        echo "it has been restarted $crashes times after a crash (MAX_RESTARTS is $MAX_RESTARTS)" && return
    fi
    now=$(state)
    if [[ -n "$now" && "$now" != RUNNING ]]; then echo "the job is being ended" && return; fi
    newest=$(python_here -m launch.progress "$@") || { echo "its checkpoints cannot be listed" && return; }
    # A run that did not resume has moved the earlier run's checkpoints away.
    if [[ "$newest" == "$newest_at_start" || "$newest" == "the start" ]]; then
        echo "this attempt has written no checkpoint (the newest is $newest)" && return
    fi
    echo "$newest" >"$LOG_DIR/newest_checkpoint"
    touch "$LOG_DIR/crashed"
}

# Requeue the job, and exit with the given code.
requeue() {
    local code
    for _ in {1..5}; do
        # A successful request ends scontrol and this script too.
        scontrol requeue "$SLURM_JOB_ID"
        code=$?
        if [[ "$code" -eq 0 || "$code" -gt 128 ]]; then exit "$1"; fi
        sleep 5
    done
    say "Slurm does not requeue the job; submitted again, it resumes from its checkpoint"
    exit "$1"
}

say "$SLURM_JOB_NUM_NODES nodes x $NPROC ranks, attempt ${SLURM_RESTART_COUNT:-0}, the first node is $MASTER_ADDR;" \
    "the ranks' logs are in $LOG_DIR"

# The tasks share all CPUs of the node: by default a step's task gets one. Each rank then takes those near its GPU
# (rlhf_mc/topology/numa.py).
cpus=$((SLURM_CPUS_ON_NODE / tasks_per_node))
step=(srun --cpu-bind=none "${site_srun[@]}")
if [[ -n "${RLHF_MC_CONTAINER:-}" && -z "${SLURM_JOB_END_TIME:-}" ]]; then
    # For trainer.stop_before_minutes: a container has no squeue.
    end=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%e 2>/dev/null) || end=""
    case $end in
        "") ;;
        N/A | NONE | Unknown) export SLURM_JOB_END_TIME=inf ;; # no time limit
        *) end=$(date --date="$end" +%s) && export SLURM_JOB_END_TIME=$end ;;
    esac
fi

preflight "$@" || [[ -n "$stop" ]] || exit 2
newest_at_start=""
if [[ "$MAX_RESTARTS" -gt 0 ]]; then newest_at_start=$(python_here -m launch.progress "$@"); fi

if [[ "$tasks_per_node" -gt 1 ]]; then
    program=(launch/slurm_rank.sh "$@")
else
    program=(launch/slurm_node.sh "$@")
fi
if [[ -n "$stop" ]]; then
    say "asked to stop before the run began"
    ended_with=$EXIT_REQUEUE
else
    # In the background: bash runs a trap only after a foreground command has ended, but `wait` returns at once.
    "${step[@]}" --nodes="$SLURM_JOB_NUM_NODES" --ntasks=$((SLURM_JOB_NUM_NODES * tasks_per_node)) \
        --ntasks-per-node="$tasks_per_node" --cpus-per-task="$cpus" --kill-on-bad-exit=1 \
        "${site_wrapper[@]}" "${program[@]}" &
    srun_pid=$!
    [[ -z "$stop" ]] || kill -USR1 "$srun_pid" # the signal came before srun_pid was set
    while kill -0 "$srun_pid" 2>/dev/null; do wait "$srun_pid"; done
    wait "$srun_pid"
    code=$?
    srun_pid=""
    ended_with=$(cat "$RLHF_MC_EXIT_CODE_FILE" 2>/dev/null || true)
    # The signal killed srun before it could pass it on: 138, or -1 if bash was in the trap at that moment.
    if [[ -n "$stop" && -z "$ended_with" && "$code" =~ ^(138|-1)$ ]]; then ended_with=$EXIT_REQUEUE; fi
fi

if [[ "$ended_with" == "$EXIT_REQUEUE" ]]; then
    # scancel, and the end of the time limit, signal the ranks too: such a job is not requeued.
    now=$(state)
    if [[ -n "$now" && "$now" != RUNNING ]]; then
        say "the job is being ended, so it is not requeued; submitted again, it resumes from its checkpoint"
        exit "$EXIT_REQUEUE"
    fi
    if made_no_progress "$@"; then
        say "error: two consecutive attempts wrote no checkpoint newer than $(cat "$LOG_DIR/newest_checkpoint"), so the" \
            "job is not requeued; give it more time (sbatch --time), or have it signalled later (sbatch --signal)"
        exit 2
    fi
    say "the run was preempted: the job is requeued"
    requeue "$EXIT_REQUEUE"
fi
if [[ "$code" -eq 0 && "$ended_with" == 0 ]]; then exit 0; fi
if [[ "$code" -eq 0 ]]; then
    # Rank 0 writes 0 only after success.json, the marker of a finished run.
    say "error: every rank ended with 0, but the run has not finished; the ranks' logs are in $LOG_DIR"
    code=1
else
    if [[ "${ended_with:-0}" -ne 0 ]]; then code=$ended_with; fi
    say "the run ended with $code; the ranks' logs are in $LOG_DIR"
fi
why_not=$(why_no_restart "$code" "$@")
if [[ -n "$why_not" ]]; then
    say "the job is not requeued: $why_not"
    exit "$code"
fi
say "the run crashed after $(cat "$LOG_DIR/newest_checkpoint"), and $newest_at_start was the newest when it started:" \
    "the job is requeued"
requeue "$code"
