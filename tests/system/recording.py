"""The program as a rank runs it. It writes to the file $RECORD_<rank> whether deterministic
algorithms are on when training starts, in torch and in the models. Started by
test_deterministic.py."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch

from rlhf_mc.trainer import loop
from rlhf_mc.trainer.run import Run

fit = loop.fit


def record_and_fit(run: Run, *args: Any) -> bool:
    found = {
        "torch": torch.are_deterministic_algorithms_enabled(),
        "models": [engine.model.config.deterministic_mode for engine in (run.actor, run.critic)],
    }
    Path(f"{os.environ['RECORD']}_{os.environ['RANK']}").write_text(json.dumps(found))
    return fit(run, *args)


if __name__ == "__main__":
    loop.fit = record_and_fit
    sys.argv = ["rlhf_mc", *sys.argv[1:]]
    runpy.run_module("rlhf_mc", run_name="__main__")
