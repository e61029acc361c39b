#!/usr/bin/env bash
# One node, one process per GPU (or NPROC processes):
#
#     launch/torchrun_1node.sh CONFIG.yaml [section.key=value ...]
#
# NPROC=2 launch/torchrun_1node.sh configs/quickstart.yaml     two processes on a CPU
#
# PYTHON: the interpreter [the site file's, .venv/bin/python beside this folder if there is one, or python3]. The exit
# code is the program's: 0 only for a run that has finished. The site file (launch/site.example.ini) has the container.
set -euo pipefail

if [[ $# -lt 1 ]]; then
    echo "usage: [NPROC=n] $0 CONFIG.yaml [section.key=value ...]" >&2
    exit 2
fi

if [[ -z "${NPROC:-}" ]]; then
    NPROC=$(nvidia-smi --list-gpus 2>/dev/null | wc -l || true)
    [[ "$NPROC" -gt 0 ]] || NPROC=1
fi

launch=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# shellcheck source=launch/env.sh
source "$launch/env.sh"
if [[ "${RLHF_MC_CONTAINER:-}" == pyxis ]]; then
    site_die "[container] runtime pyxis starts containers by srun, which this launcher does not use: submit" \
        "slurm/ppo_1node.sh; inside the container already, set RLHF_MC_SITE=/dev/null"
fi

# --signals-to-handle: SIGUSR1 would kill torchrun but not its ranks. With this option torchrun passes it on to the
# ranks and waits 30 s for them, as after SIGTERM.
# -P: keep this folder's modules from hiding others of the same name.
exec "${site_wrapper[@]}" "$PYTHON" -P "$launch/torchrun_1node.py" --standalone --nproc-per-node "$NPROC" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 -m rlhf_mc "$@"
