#!/usr/bin/env bash
# Apex in the image (Dockerfile). The image is complete without it: beside Transformer Engine, Megatron-Core takes nothing
# from Apex. So a failure is no error of the build; `python -m rlhf_mc --check` prints the reason.
#
#     requirements/apex.sh build FOLDER      compile its wheel into FOLDER, or write to FOLDER/missing why there is none;
#                                            with APEX=0 in the environment there is none
#     requirements/apex.sh install FOLDER    install the wheel, or keep the reason in the Python environment
set -euo pipefail

build() {
    mkdir -p "$1"
    if [[ "${APEX:-1}" == 0 ]]; then
        echo "the image was built with APEX=0" >"$1/missing"
    elif ! pip wheel --no-cache-dir --no-deps --no-build-isolation --wheel-dir "$1" -r "$(dirname "$0")/apex.txt"; then
        echo "its build failed when the image was built" >"$1/missing"
    fi
}

install() {
    local reason
    if [[ -e "$1/missing" ]]; then
        reason=$(cat "$1/missing")
    elif pip install --no-cache-dir --no-deps "$1"/*.whl &&
        python -c "import torch, apex, amp_C, fused_weight_gradient_mlp_cuda"; then
        echo "apex: installed; the image is complete"
        return
    else
        pip uninstall --yes apex
        reason="it was built with the image, but cannot be imported"
    fi
    # rlhf_mc/machine/facts.py reads it.
    echo "$reason" >"$(python -c "import sys; print(sys.prefix)")/apex_missing"
    echo "apex: not installed: $reason; the image is complete without it, as long as it has Transformer Engine"
}

"$@"
