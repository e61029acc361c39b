#!/usr/bin/env bash
# Stop what cluster_up.sh started (by pid, each pid checked against what it must be), remove its folder.
# SLURM_CI_KEEP=1 keeps the folder (logs). Idempotent; always exits 0 unless something would not die.
# Lists of process ids are meant to be split into words.
# shellcheck disable=SC2046,SC2086
set -uo pipefail
export LC_ALL=C
DIR=${SLURM_CI_DIR:-/tmp/slurm-ci-$(id -u)}
PATH=$PATH:/usr/sbin:/sbin
export SLURM_CONF=$DIR/etc/slurm.conf
[ -d "$DIR" ] || { echo "cluster_down: nothing in $DIR" >&2; exit 0; }
[ -f "$DIR/.slurm-ci" ] || { echo "cluster_down: $DIR is not ours, left alone" >&2; exit 1; }

ours() {  # pid comm: is pid alive, of that name, and started by cluster_up.sh for this folder?
  [ "$(cat "/proc/$1/comm" 2>/dev/null)" = "$2" ] || return 1
  { tr "\0" "\n" < "/proc/$1/environ"; } 2>/dev/null | grep -qxF "SLURM_CI_TAG=$DIR"
}
stop() {  # comm pid...: TERM, wait up to 4 s, KILL
  local comm=$1; shift; local p live end=$((SECONDS+4))
  for p in "$@"; do ours "$p" "$comm" && kill -TERM "$p" 2>/dev/null; done
  while [ $SECONDS -lt $end ]; do
    live=""; for p in "$@"; do ours "$p" "$comm" && live="$live $p"; done
    [ -z "$live" ] && return 0; sleep .1
  done
  for p in $live; do ours "$p" "$comm" && kill -KILL "$p" 2>/dev/null; done
  sleep .2; for p in $live; do ours "$p" "$comm" && return 1; done; return 0
}
pids() { local f; for f in "$@"; do [ -f "$f" ] && cat "$f"; done; }
# proctrack/linuxproc follows parent pids, so a process whose parent died escapes Slurm: find it by its environment.
strays() { local d p e; for d in /proc/[0-9]*; do p=${d#/proc/}; [ "$p" = $$ ] && continue
  e=$({ tr '\0' '\n' < "$d/environ"; } 2>/dev/null) || continue
  grep -qxF "SLURM_CONF=$SLURM_CONF" <<<"$e" && grep -q '^SLURM_JOB_ID=' <<<"$e" && echo "$p"; done; return 0; }
steps() { local d p; for d in /proc/[0-9]*; do p=${d#/proc/}; ours "$p" slurmstepd && echo "$p"; done; }

# 1. let Slurm kill and clear its own jobs
live_jobs() { timeout 5 squeue -h -o %A 2>/dev/null | sort -u; }
if timeout 5 scontrol ping 2>/dev/null | grep -q 'is UP' && [ -n "$(live_jobs)" ]; then
  live_jobs | xargs -r -n 50 timeout 5 scancel --full --signal=KILL 2>/dev/null
  live_jobs | xargs -r -n 50 timeout 5 scancel 2>/dev/null
  end=$((SECONDS+6)); while [ $SECONDS -lt $end ] && [ -n "$(live_jobs)" ]; do sleep .2; done
fi
rc=0
# 2. daemons, then any slurmstepd they left
stop slurmd $(pids "$DIR"/run/slurmd.*.pid) || rc=1
stop slurmctld $(pids "$DIR"/run/slurmctld.pid) || rc=1
stop slurmstepd $(steps) || rc=1
for sig in TERM KILL; do
  s=$(strays); [ -n "$s" ] || break
  echo "cluster_down: $sig to processes that outlived their job:" $s >&2; kill -$sig $s 2>/dev/null; for _ in 1 2 3 4 5 6 7 8 9 10; do sleep .1; [ -z "$(strays)" ] && break; done
done
[ -z "$(strays)" ] || rc=1
stop munged $(pids "$DIR"/run/munged.pid) || rc=1
if [ -w /etc/hosts ] && grep -qF "# slurm-ci:$DIR" /etc/hosts; then   # cp, not mv: /etc/hosts may be a bind mount
  t=$(mktemp) && grep -vF "# slurm-ci:$DIR" /etc/hosts > "$t" && cat "$t" > /etc/hosts; rm -f "$t"
fi
rm -f "$DIR/sig"; [ "${SLURM_CI_KEEP:-0}" = 1 ] || rm -rf "$DIR"
echo "cluster_down: stopped ($DIR), rc=$rc" >&2
exit $rc
