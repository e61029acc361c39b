"""Print the memory, the times and the traffic of a run before it is queued, and end with code 2 if
it does not fit.

python -m rlhf_mc.planner CONFIG.yaml [section.key=value ...] [--model MODEL] --nodes N
    [--gpus-per-node 8] [--gpu h100] [--json]
python -m rlhf_mc.planner CONFIG.yaml ... --search [--top N] [--write PATH.yaml]
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence

from rlhf_mc.runtime.tool import (
    GPUS_PER_NODE,
    NODES,
    Parser,
    end_on_interrupt,
    finite_number,
    whole_number,
)

if __name__ == "__main__":
    end_on_interrupt()

from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import load_config, read_settings
from rlhf_mc.planner.gpus import GPUS, NETWORK_BANDWIDTH, Machine, parse_gpu
from rlhf_mc.planner.host_memory import plan_host_memory
from rlhf_mc.planner.lengths import Lengths, expected_lengths
from rlhf_mc.planner.measured import expect_times
from rlhf_mc.planner.memory import Capacity
from rlhf_mc.planner.published import add_model_option, with_model
from rlhf_mc.planner.report import (
    NO_TIMES,
    as_json,
    check_new_file,
    compare_with_megatron,
    host_table,
    search_json,
    search_table,
    table,
    times_json,
    times_table,
    traffic_table,
    write_config,
)
from rlhf_mc.planner.search import PlannedSettings, search
from rlhf_mc.planner.start import (
    approximations,
    check_fit,
    fit_error,
    plan_run,
    planned_shapes,
)
from rlhf_mc.planner.storage import STORAGE_BANDWIDTH, plan_storage
from rlhf_mc.planner.times import plan_times
from rlhf_mc.planner.traffic import UPDATE_WEIGHTS, plan_traffic
from rlhf_mc.runtime.exit_codes import exit_code


def main(argv: Sequence[str]) -> int:
    """Return the exit code."""
    arguments = make_parser().parse_intermixed_args(argv)
    return exit_code(
        "rlhf_mc", lambda: _search(arguments, argv) if arguments.search else _plan(arguments)
    )


def _capacity(arguments: argparse.Namespace) -> Capacity:
    world = arguments.nodes * arguments.gpus_per_node
    return Capacity(
        world, parse_gpu(arguments.gpu).memory, True, arguments.gpus_per_node, arguments.host_memory
    )


def _machine(arguments: argparse.Namespace) -> Machine | None:
    """Return the machine, None if its rates are not known."""
    rates = parse_gpu(arguments.gpu).rates
    world = arguments.nodes * arguments.gpus_per_node
    return (
        None
        if rates is None
        else Machine(world, arguments.gpus_per_node, rates, arguments.network_bandwidth)
    )


def _plan(arguments: argparse.Namespace) -> None:
    """Print the plan of the config. Raise UserError if it does not fit."""
    if arguments.write is not None:
        raise UserError("--write is for the config that --search finds; add --search")
    capacity = _capacity(arguments)
    gpus_per_node = arguments.gpus_per_node
    overrides = with_model(arguments.config, arguments.overrides, arguments.model)
    cfg = load_config(arguments.config, overrides)
    shapes = planned_shapes(cfg)
    plan = plan_run(cfg, shapes, capacity)
    fit = check_fit(cfg, shapes, plan, capacity)
    lengths = expected_lengths(cfg, arguments.mean_prompt_length, arguments.mean_response_length)
    host = plan_host_memory(cfg, shapes, plan, gpus_per_node)
    storage = plan_storage(cfg, shapes, plan, gpus_per_node, arguments.storage_bandwidth)
    transfers = plan_traffic(cfg, shapes, capacity.num_ranks, gpus_per_node, lengths)
    machine = _machine(arguments)
    times = expected = None
    if machine is not None:
        weights = [transfer for transfer in transfers if transfer.phase == UPDATE_WEIGHTS]
        times = plan_times(cfg, shapes, plan, weights, machine, lengths)
        expected = expect_times(cfg, shapes, plan, weights, machine, lengths)
    if arguments.json:
        files = {"host_memory": vars(host), "storage": {**vars(storage), "space": storage.space}}
        text = {
            **as_json(plan, fit, transfers),
            **files,
            "times": times and times_json(times, lengths, expected),
        }
        print(json.dumps(text))
    else:
        memory = table(cfg, plan, capacity.device_bytes)
        print(memory, host_table(host, storage), traffic_table(transfers), sep="\n")
        print(times_table(times, expected, lengths) if times and expected else NO_TIMES)
        if times and machine and fit.problem is None and cfg.actor.strategy == "fsdp2":
            settings = read_settings(arguments.config, overrides)
            print(compare_with_megatron(settings, machine, capacity, lengths, times.seconds))
    if fit.problem is not None:
        raise UserError(fit_error(cfg, shapes, capacity, fit))
    if not arguments.json:
        left = (
            f"fits: the fullest phase is {fit.phase}, and leaves {fit.spare / 1e9:.1f} GB of each "
            "device"
        )
        print(left + approximations(cfg, capacity))


def _search(arguments: argparse.Namespace, argv: Sequence[str]) -> None:
    """Print the best plans, and write the best as a config. Raise UserError if none fits."""
    if arguments.write is not None:
        check_new_file(arguments.write)
    choices, lengths, text = find_settings(arguments)
    print(json.dumps(search_json(choices, lengths)) if arguments.json else text)
    if arguments.write is not None:
        settings = read_settings(arguments.config, arguments.overrides)
        write_config(
            arguments.write, f"python -m rlhf_mc.planner {shlex.join(argv)}", settings, choices[0]
        )
        if not arguments.json:
            print(f"wrote the first of these to {arguments.write}")


def find_settings(
    arguments: argparse.Namespace, keeps_split: bool = False
) -> tuple[list[PlannedSettings], Lengths, str]:
    """Return the best plans for a config, their lengths, and the table of them. Raise UserError if
    none fits. arguments: as the parser reads them. keeps_split: search's."""
    machine = _machine(arguments)
    if machine is None:
        raise UserError(
            f"--search ranks by times, and --gpu {arguments.gpu} has none; name one of "
            f"{', '.join(GPUS)}"
        )
    overrides = with_model(arguments.config, arguments.overrides, arguments.model)
    cfg = load_config(arguments.config, overrides)
    lengths = expected_lengths(cfg, arguments.mean_prompt_length, arguments.mean_response_length)
    settings = read_settings(arguments.config, overrides)
    capacity = _capacity(arguments)
    choices = search(settings, machine, capacity, lengths, arguments.top, keeps_split)
    text = search_table(choices, lengths)
    if cfg.actor.strategy == "fsdp2":
        seconds = choices[0].times.seconds
        line = compare_with_megatron(settings, machine, capacity, lengths, seconds)
        text = f"{text}\n{line}"
    return choices, lengths, text


_bandwidth = finite_number(1e6, "bytes per second of at least 1e6, such as 50e9")
_bytes = finite_number(1e9, "bytes of at least 1e9, such as 2e12")


def make_parser() -> Parser:
    """Return the parser of the command line."""
    parser = Parser("The memory and the times of a run on GPUs.", "python -m rlhf_mc.planner")
    parser.add_argument("config", help="the config of the run")
    parser.add_argument(
        "overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's"
    )
    add_model_option(parser)
    parser.add_argument("--nodes", type=NODES, default=1, help="number of nodes")
    parser.add_argument("--gpus-per-node", type=GPUS_PER_NODE, default=8)
    parser.add_argument(
        "--gpu", default="h100", help=f"{', '.join(GPUS)}, or the bytes of its memory"
    )
    parser.add_argument(
        "--network-bandwidth",
        type=_bandwidth,
        default=NETWORK_BANDWIDTH,
        metavar="BYTES",
        help=(
            "bytes per second that each GPU sends to other nodes (default 50e9: a 400 Gb/s adapter "
            "for each)"
        ),
    )
    parser.add_argument(
        "--host-memory",
        type=_bytes,
        metavar="BYTES",
        help="host memory that a node has, to be compared (2e12)",
    )
    parser.add_argument(
        "--storage-bandwidth",
        type=_bandwidth,
        default=STORAGE_BANDWIDTH,
        metavar="BYTES",
        help="bytes per second between a node and the checkpoints' storage (default 5e9)",
    )
    for name in ("prompt", "response"):
        text = f"tokens of a typical {name}, for the times (default: data.max_{name}_length)"
        parser.add_argument(
            f"--mean-{name}-length", type=whole_number(1, 1 << 30), metavar="N", help=text
        )
    parser.add_argument(
        "--search", action="store_true", help="list the settings with the shortest step that fit"
    )
    parser.add_argument(
        "--top",
        type=whole_number(1, 1000),
        default=10,
        metavar="N",
        help="number of plans to list (default 10)",
    )
    parser.add_argument(
        "--write", metavar="PATH.yaml", help="write the config with the settings of the best plan"
    )
    parser.add_argument("--json", action="store_true", help="print bytes as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
