"""Compare the layouts of every rank of a config with the real models, on one CPU and without
weights.

python tools/check_layouts.py CONFIG.yaml [section.key=value ...] [--model MODEL] --nodes N
[--gpus-per-node 8]

Each rank's models are built on torch's meta device, of which config.json is enough: Megatron-Core's
for all roles, and vLLM's. Names, shapes, types, and how often the ranks hold each element of the
checkpoint must agree with the layouts.
"""

from __future__ import annotations

import os
import sys
import time

os.environ["RLHF_MC_DEVICE"] = "cpu"  # the modules of a CPU: a GPU takes no part

from rlhf_mc.runtime.tool import GPUS_PER_NODE, NODES, Parser, end_on_interrupt

if __name__ == "__main__":
    end_on_interrupt()

from rlhf_mc.architectures.run_shapes import model_shapes
from rlhf_mc.config.checks import check_config
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import load_config
from rlhf_mc.config.roles import num_rollout_ranks, role_ranks
from rlhf_mc.config.schema import Config, layouts
from rlhf_mc.models.transformer_engine import import_transformer_engine
from rlhf_mc.planner.published import add_model_option, with_model
from rlhf_mc.reshard.coverage import Coverage, rollout_coverage
from rlhf_mc.reshard.model_checks import check_layouts
from rlhf_mc.reshard.placement import rollout_layouts
from rlhf_mc.rollout.engines import engine_factory
from rlhf_mc.runtime.exit_codes import exit_code


def check(cfg: Config, world: int) -> None:
    """Check the layouts of all roles and of vLLM, and print a line for each. Raise UserError at a
    difference."""
    import_transformer_engine()
    from rlhf_mc.setup.layout_check import CheckedRole, check_training_layouts

    check_config(cfg, world)
    shapes = {role: shape for role, (_, shape) in model_shapes(cfg).items()}
    check_layouts(cfg, shapes)
    engine = engine_factory(cfg.rollout)
    base = shapes["actor"].base
    engine.check_layout(base, cfg.rollout.tensor_model_parallel_size)
    models = {role: (shape, layouts(cfg)[role]) for role, shape in shapes.items()}
    sizes = {role: len(role_ranks(cfg, role, world)) for role in models}
    results: dict[str, CheckedRole] = {}
    for size in dict.fromkeys(sizes.values()):
        of_size = {role: model for role, model in models.items() if sizes[role] == size}
        results |= check_training_layouts(of_size, size)
    for role, checked in results.items():
        report(role, str(checked.mesh), world, checked.num_local, checked.coverage, checked.seconds)
    start = time.perf_counter()
    tp = cfg.rollout.tensor_model_parallel_size
    count = num_rollout_ranks(cfg, world)
    groups = [list(range(first, first + tp)) for first in range(0, count, tp)]
    coverage = rollout_coverage(base, tp, rollout_layouts(base, groups, engine.layout))
    if cfg.rollout.name == "custom":
        print("rollout: not compared with a model: the engine is the user's")
        return
    try:
        from rlhf_mc.rollout.vllm_parameters import check_rollout_layouts
    except UserError as error:
        print(f"rollout: not compared with vLLM: {error}")
        return
    num_local = check_rollout_layouts(cfg, base)
    report(
        "rollout",
        f"{len(groups)} engines of TP {tp}",
        tp,
        num_local,
        coverage,
        time.perf_counter() - start,
    )


def report(
    role: str, mesh: str, num_ranks: int, num_local: int, coverage: Coverage, seconds: float
) -> None:
    """Print the line of a role."""
    print(
        f"{role}: {mesh}: {num_local} parameters of {num_ranks} ranks agree with the layouts; "
        f"{coverage.num_tensors} tensors, {coverage.num_elements / 1e9:.3f}e9 elements, are each "
        f"held as often as they should be, {coverage.num_held / coverage.num_elements:.2f} times "
        f"on average ({seconds:.1f} s)",
        flush=True,
    )


def main() -> int:
    """Check the config that the arguments name. Return the exit code."""
    parser = Parser(__doc__)
    parser.add_argument("config", help="the config of the run")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's"
    )
    add_model_option(parser)
    parser.add_argument("--nodes", type=NODES, required=True, help="number of nodes")
    parser.add_argument("--gpus-per-node", type=GPUS_PER_NODE, default=8)
    args = parser.parse_intermixed_args()
    world = args.nodes * args.gpus_per_node

    def run() -> None:
        check(load_config(args.config, with_model(args.config, args.overrides, args.model)), world)

    return exit_code("check_layouts", run)


if __name__ == "__main__":
    sys.exit(main())
