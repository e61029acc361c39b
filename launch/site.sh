# shellcheck shell=bash
# The site file's settings as bash variables; launch/env.sh sources this file. launch/site_settings.py reads the site file.
# Without one nothing is set, and no Python is needed here.
#
#   site_srun     options for each srun          site_wrapper  the command that starts the container, before the program
#   site_python   the interpreter, or empty      RLHF_MC_CONTAINER  the container's runtime, exported; unset without one
# shellcheck disable=SC2034  # for the launchers
site_srun=()
site_wrapper=()
site_modules=()
# shellcheck disable=SC2034
site_python=""
unset RLHF_MC_CONTAINER

site_die() {
    echo "site: error: $*" >&2
    exit 2
}

# Load the modules. The function `module` is for interactive shells, and a batch job may be without it.
site_load_modules() {
    local init options=$-
    set +eu # Lmod and Environment Modules read variables that are not set
    for init in /etc/profile.d/{modules,lmod,z00_lmod}.sh; do
        # shellcheck disable=SC1090
        declare -F module >/dev/null || { [[ -r "$init" ]] && source "$init"; }
    done
    declare -F module >/dev/null || site_die "[launch] modules: this shell has no command \`module\`"
    module load "${site_modules[@]}" || site_die "\`module load ${site_modules[*]}\` failed"
    [[ "$options" != *e* ]] || set -e
    [[ "$options" != *u* ]] || set -u
}

site_root=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
if [[ -n "${RLHF_MC_SITE:-}" || -e "$site_root/site.ini" ]]; then
    python3 -c 'import sys; sys.exit(sys.version_info < (3, 7))' 2>/dev/null ||
        site_die "python3 of version 3.7 or later reads the site file, and $(hostname) has none on its PATH"
    site_assignments=$(python3 "$site_root/launch/site_settings.py" shell) || exit 2
    eval "$site_assignments"
    if [[ -n "${RLHF_MC_CONTAINER:-}" && -n "${LOG_ROOT:-}" ]]; then
        mkdir -p "$LOG_ROOT" || site_die "LOG_ROOT $LOG_ROOT cannot be created" # it is mounted
    fi
    [[ ${#site_modules[@]} -eq 0 ]] || site_load_modules
    if [[ ${#site_wrapper[@]} -gt 0 ]] && ! command -v "${site_wrapper[0]}" >/dev/null; then
        site_die "[container] runtime ${site_wrapper[0]}: there is no such command on $(hostname)"
    fi
fi
