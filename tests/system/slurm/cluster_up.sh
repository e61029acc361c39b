#!/usr/bin/env bash
# Start a real Slurm (munged + slurmctld + N slurmd) on this one host, by hand, no systemd.
#   eval "$(cluster_up.sh)"            # or:  cluster_up.sh && . "$SLURM_CI_DIR/env.sh"
# Knobs (environment):
#   SLURM_CI_DIR   state folder               [/tmp/slurm-ci-$UID]   (absolute, <=70 chars, no blanks)
#   SLURM_CI_NODES virtual nodes              [2]
#   SLURM_CI_CPUS  CPUs each node claims      [8]      (need not exist: config_overrides)
#   SLURM_CI_MEM   MiB each node claims       [64000]  (need not exist)
#   SLURM_CI_GPUS  fake GPUs each node claims [8]      (0: no GRES at all)
#   SLURM_CI_PORT  slurmctld port; node i listens on PORT+i [16800]
#   SLURM_CI_GPU_TYPE type of the fake GPUs (for --gpus-per-node=h100:8) [none]
#   SLURM_CI_FEATURES node features (for --constraint=...)               [none]
#   SLURM_CI_UTS    1: `hostname` on a node is the node's name (needs root); 0: not [1 where it can]
#   SLURM_CI_PREFIX node name prefix  [node; where /etc/hosts cannot be written: 127.0.1. -> 127.0.1.1, 127.0.1.2, ...]
# One cluster per SLURM_CI_DIR + SLURM_CI_PORT range; several may run side by side.
# Idempotent: a healthy cluster is left alone, a half-dead one is torn down and started again.
set -euo pipefail
export LC_ALL=C
DIR=${SLURM_CI_DIR:-/tmp/slurm-ci-$(id -u)}
N=${SLURM_CI_NODES:-2} CPUS=${SLURM_CI_CPUS:-8} MEM=${SLURM_CI_MEM:-64000} GPUS=${SLURM_CI_GPUS:-8}
PORT=${SLURM_CI_PORT:-16800} PFX=${SLURM_CI_PREFIX:-}
TYPE=${SLURM_CI_GPU_TYPE:-} FEAT=${SLURM_CI_FEATURES:-}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ME=$(id -un)
PATH=$PATH:/usr/sbin:/sbin
say() { echo "cluster_up: $*" >&2; }
die() { say "$*"; exit 1; }
case $DIR in /*) ;; *) die "SLURM_CI_DIR must be absolute" ;; esac
case $DIR in *[[:space:]]*) die "SLURM_CI_DIR must not hold blanks" ;; esac
[ ${#DIR} -le 70 ] || die "SLURM_CI_DIR too long for a unix socket path"
for b in munged slurmctld slurmd sbatch srun scontrol; do
  command -v $b >/dev/null || die "no $b: apt-get install -y --no-install-recommends munge slurmctld slurmd slurm-client"
done

# `scontrol show hostnames | head -n1` (the usual MASTER_ADDR) must resolve here. Root: a line in /etc/hosts.
# Otherwise node names that are themselves loopback addresses (Slurm accepts those).
if [ -z "$PFX" ]; then
  PFX=node
  if [ ! -w /etc/hosts ] && ! getent ahostsv4 "$PFX$N" >/dev/null; then PFX=127.0.1.; fi
fi
# As root each slurmd runs in its own UTS namespace, so that `hostname` on a node is the node's name.
UTS=${SLURM_CI_UTS:-}
if [ -z "$UTS" ]; then
  UTS=0; if [ -w /etc/hosts ] && [ "$PFX" = node ] && unshare --uts hostname node1 2>/dev/null; then UTS=1; fi
fi
SIG="v1 n=$N c=$CPUS m=$MEM g=$GPUS:$TYPE f=$FEAT p=$PORT x=$PFX u=$UTS"
export SLURM_CONF=$DIR/etc/slurm.conf
healthy() {
  [ -f "$DIR/sig" ] && [ "$(cat "$DIR/sig")" = "$SIG" ] || return 1
  timeout 5 scontrol ping 2>/dev/null | grep -q 'is UP' || return 1
  local i
  for i in $(seq 1 "$N"); do
    local p; p=$(cat "$DIR/run/slurmd.$PFX$i.pid" 2>/dev/null) || return 1
    { tr '\0' '\n' < "/proc/$p/environ"; } 2>/dev/null | grep -qxF "SLURM_CI_TAG=$DIR" || return 1   # a zombie's is empty
  done
  [ -z "$(timeout 5 sinfo -h -N -t down,drain,fail,no_respond,unknown -o %N)" ]
}
if healthy; then say "already up in $DIR"; cat "$DIR/env.sh"; exit 0; fi
if [ -d "$DIR" ] && [ -n "$(ls -A "$DIR")" ]; then SLURM_CI_KEEP=0 SLURM_CI_DIR=$DIR "$HERE/cluster_down.sh" >&2; fi
for i in $(seq 0 "$N"); do
  if (exec 3<>"/dev/tcp/127.0.0.1/$((PORT+i))") 2>/dev/null; then die "port $((PORT+i)) is taken: set SLURM_CI_PORT"; fi
done

umask 022
mkdir -p "$DIR" && : > "$DIR/.slurm-ci" && chmod 755 "$DIR"
mkdir -p "$DIR"/{etc,run,log,state,spool,dev,secret}
chmod 700 "$DIR/secret"
echo "$SIG" > "$DIR/sig"

# munge: own key and socket. The socket's folder must be a+x, the key's must not be.
head -c 1024 /dev/urandom > "$DIR/secret/munge.key"; chmod 400 "$DIR/secret/munge.key"

# Loopback only: NoInAddrAny makes the daemons bind the address *gethostname()* resolves to,
# so use it only where that is a 127/8 address; elsewhere they bind 0.0.0.0.
ADDR=$(getent ahostsv4 "$(hostname)" | awk 'NR==1{print $1}' || true)
case $ADDR in
  127.*) COMM="CommunicationParameters=NoCtldInAddrAny,NoInAddrAny" ;;
  *) ADDR=127.0.0.1 COMM="# hostname is not on 127/8: listening on every address"
     say "WARNING: $(hostname) does not resolve to 127/8, slurm listens on 0.0.0.0 (munge-authenticated)" ;;
esac

GRES_NODE="" GRES_TOP=""
if [ "$GPUS" -gt 0 ]; then   # fake GPUs. Slurm stat()s File= and wants a device, or it sets no CUDA_VISIBLE_DEVICES
  for g in $(seq 0 $((GPUS-1))); do ln -sfn /dev/null "$DIR/dev/nvidia$g"; done
  echo "Name=gpu ${TYPE:+Type=$TYPE }File=$DIR/dev/nvidia[0-$((GPUS-1))]" > "$DIR/etc/gres.conf"
  GRES_NODE="Gres=gpu:${TYPE:+$TYPE:}$GPUS" GRES_TOP="GresTypes=gpu"
fi
# Read only by plugins that use cgroups; none is configured below. (Slurm >= 24.05 wants
# CgroupPlugin=disabled here when there is no systemd; 22.05/23.x do not know that word.)
echo "# no cgroups" > "$DIR/etc/cgroup.conf"
ver=$(slurmd -V | sed 's/[^0-9]*\([0-9]*\.[0-9]*\).*/\1/')
at_least() { [ "$(printf '%s\n' "$1" "$ver" | sort -V | head -1)" = "$1" ]; }
if at_least 24.05; then echo CgroupPlugin=disabled > "$DIR/etc/cgroup.conf"; fi
# "a preempted job gets its --signal first": renamed in 23.02
SCHED=batch_sched_delay=0,sched_min_interval=0,sched_interval=1,bf_interval=1,default_queue_depth=1000
if at_least 23.02; then PREEMPT=PreemptParameters=send_user_signal; else PREEMPT=SlurmctldParameters=preempt_send_user_signal; fi

{ cat <<CONF
ClusterName=ci
# fresh job ids per start, so that files named after %j are never those of an earlier run
FirstJobId=$((1000 + $(date +%s) % 50000))
SlurmctldHost=localhost($ADDR)
SlurmctldPort=$PORT
AuthType=auth/munge
# cred_expire (default 120 s, min 5) is also how long a requeued job waits before it starts again
AuthInfo=socket=$DIR/run/munge.sock,cred_expire=5
$COMM
SlurmUser=$ME
SlurmdUser=$ME
StateSaveLocation=$DIR/state
SlurmdSpoolDir=$DIR/spool/%n
SlurmctldPidFile=$DIR/run/slurmctld.pid
SlurmdPidFile=$DIR/run/slurmd.%n.pid
SlurmctldLogFile=$DIR/log/slurmctld.log
SlurmdLogFile=$DIR/log/slurmd.%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/filetxt
JobCompLoc=$DIR/log/jobcomp.txt
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=$((MEM/CPUS))
SchedulerType=sched/backfill
SchedulerParameters=$SCHED
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
$PREEMPT
# as on many sites: only a job that says --requeue may be requeued
JobRequeue=0
KillWait=5
MinJobAge=3600
EnforcePartLimits=ALL
ReturnToService=2
SlurmdTimeout=300
SlurmdParameters=config_overrides
$GRES_TOP
CONF
  for i in $(seq 1 "$N"); do
    echo "NodeName=$PFX$i NodeHostname=$([ "$UTS" = 1 ] && echo "$PFX$i" || echo localhost) NodeAddr=$ADDR Port=$((PORT+i)) CPUs=$CPUS RealMemory=$MEM $GRES_NODE ${FEAT:+Features=$FEAT} State=UNKNOWN"
  done
  echo "PartitionName=batch Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=10 State=UP"
  echo "PartitionName=preempt Nodes=ALL MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=10 State=UP"
} > "$SLURM_CONF"

if ! getent ahostsv4 "$PFX$N" >/dev/null; then
  # One address for all: with NoInAddrAny and an address per node, srun inside a job hangs (slurmstepd calls
  # back the connection's source address, which is always 127.0.0.1).
  if [ -w /etc/hosts ]; then echo "$ADDR $(seq -f "$PFX%g" -s ' ' 1 "$N") # slurm-ci:$DIR" >> /etc/hosts
  else say "WARNING: /etc/hosts not writable and $PFX$N does not resolve: MASTER_ADDR from 'scontrol show hostnames' will fail"; fi
fi

cat > "$DIR/env.sh" <<ENV
export SLURM_CONF=$SLURM_CONF SLURM_CI_DIR=$DIR
ENV

# The daemons get a clean environment: SLURM_*/SBATCH_* leaking in from an outer job confuses them.
run() { env -i PATH="$PATH" HOME="$HOME" LC_ALL=C SLURM_CONF="$SLURM_CONF" SLURM_CI_TAG="$DIR" "$@" </dev/null >>"$DIR/log/start.log" 2>&1; }
run munged -S "$DIR/run/munge.sock" --key-file="$DIR/secret/munge.key" --log-file="$DIR/log/munged.log" \
    --pid-file="$DIR/run/munged.pid" --seed-file="$DIR/secret/munge.seed" --origin=127.0.0.1 || die "munged failed: $(tail -3 "$DIR/log/start.log")"
for _ in $(seq 50); do [ -S "$DIR/run/munge.sock" ] && break; sleep .1; done
munge -n -S "$DIR/run/munge.sock" | unmunge -S "$DIR/run/munge.sock" >/dev/null || die "munge does not answer"
run slurmctld -c || die "slurmctld failed: $(tail -3 "$DIR/log/start.log")"
for i in $(seq 1 "$N"); do mkdir -p "$DIR/spool/$PFX$i"
  # shellcheck disable=SC2016  # expanded by the inner bash
  if [ "$UTS" = 1 ]; then run unshare --uts bash -c 'hostname "$1" && exec slurmd -N "$1"' - "$PFX$i"; else run slurmd -N "$PFX$i"; fi || die "slurmd $i failed: $(tail -3 "$DIR/log/start.log")"; done
end=$((SECONDS+25))
while [ $SECONDS -lt $end ]; do
  [ "$(timeout 3 sinfo -h -N -p batch -t idle -o %N 2>/dev/null | grep -c .)" = "$N" ] && { say "$N nodes idle in $DIR"; cat "$DIR/env.sh"; exit 0; }
  sleep .1
done
timeout 3 sinfo -N -l >&2 || true; tail -20 "$DIR"/log/*.log >&2
die "nodes did not come up in 25 s"
