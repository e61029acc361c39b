"""A function that the ranks run in test_rollout_tail.py."""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


def measured(kind: str) -> dict[str, dict[str, Any]]:
    """Measure all variants on this rank's engine, which compares its schedule with the simulator's.
    Return their figures, those of the simulator as "simulated"."""
    import rollout_simulator
    import rollout_tail
    import rollout_workload

    workload = rollout_workload.Workload(kind, dist.get_world_size(), limit=64, places=4)
    with tempfile.TemporaryDirectory() as directory:
        engine = rollout_tail.build_engine(workload, Path(directory))
    results = {}
    try:
        for name, variant in rollout_workload.VARIANTS.items():
            figures, _ = rollout_tail.measure(engine, workload, variant)
            records = [
                {"steps": engine.steps, "added": engine.added, "exchanges": engine.exchanges}
            ]
            costs = rollout_tail.fit_costs(records, engine)
            simulated = rollout_simulator.simulate(workload, variant, costs)
            results[name] = asdict(figures) | {"simulated": asdict(simulated)}
    finally:
        engine.close()
    return results
