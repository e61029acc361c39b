"""Convert the settings of a verl run to a config of ours.

    python tools/from_verl.py CONFIG.yaml [key=value ...] > ours.yaml
    python tools/from_verl.py run_verl.sh [key=value ...] > ours.yaml
    python tools/from_verl.py CONFIG.yaml run_verl.sh [key=value ...] > ours.yaml
    python tools/from_verl.py key=value ... > ours.yaml

    --env NAME=VALUE    a variable of the script's environment, or one that only running the script
                        would tell
    --env NAME          the same, with the value that this process has; HOME and PWD are known
    --command N         the N-th command of a script that starts verl several times
    --strategy megatron Megatron's layout for a run of FSDP
    --nodes N --gpus-per-node N --gpu h100
                        a layout for this machine, by the planner's search

With a script, CONFIG.yaml is the file that the script names with --config-name.

Of a script, the overrides of its one command with `-m verl.trainer.main_ppo` (or
recipe.dapo.main_dapo, one_step_off_policy.main_ppo, fully_async_policy.fully_async_main) are read,
and the variables that the script assigns are replaced; nothing is run. `pip install shfmt-py`
brings the parser.
Overrides on this command line replace the file's, and '~key' removes one. With a machine, the
planner chooses layout, offload, recomputation and token budgets for it; the directory of the model
must be there, or --model names its shape as for the planner. resource_pools are the script's.
FSDP stays FSDP2, or becomes Megatron's layout where it cannot or does not fit; a line compares
them.

The config goes to the standard output; a report on each setting, and on verl's defaults that differ
from ours, to the standard error. With a setting that is not supported no config is written and the
exit code is 2: remove each by '~key' to run without it. docs/from_verl.md lists the differences.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rlhf_mc.runtime.tool import end_on_interrupt

if __name__ == "__main__":
    end_on_interrupt()

from verl_input.reading import STRATEGY, read_arguments, split_arguments

from rlhf_mc.config.checks import check_config
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import flatten_settings, load_config, nest_settings
from rlhf_mc.config.masking import masked
from rlhf_mc.planner.__main__ import find_settings, make_parser
from rlhf_mc.verl.conversion import Conversion, convert
from rlhf_mc.verl.parallelism import without_roles_layouts


def config_problem(text: str, processes: int) -> str | None:
    """Return the error of load_config or validate for a config, or None."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ours.yaml"
        path.write_text(text)
        try:
            check_config(load_config(str(path)), processes)
        except UserError as error:
            return str(error).removeprefix(f"{path}: ")
    return None


def converted_arguments(arguments: Sequence[str]) -> Conversion:
    """Return our settings for the arguments of this program, without a machine. Raise UserError for
    a mistake in them."""
    given = split_arguments(arguments)
    reading = read_arguments(given)
    conversion = convert(reading.settings, reading.engine, given.strategy)
    conversion.notes = reading.notes
    return conversion


def machine_options(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the options that name a machine, as the planner reads them, and the other
    arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--nodes", "--gpus-per-node", "--gpu", "--model"):
        parser.add_argument(name)
    named, others = parser.parse_known_args(arguments)
    given = {
        name.replace("_", "-"): value for name, value in vars(named).items() if value is not None
    }
    return [f"--{name}={value}" for name, value in given.items()], others


def set_layout(conversion: Conversion, machine: Sequence[str]) -> str:
    """Set the layout that the planner finds for a machine, its nodes and its processes per node.
    Return the table of what it finds. Raise UserError if nothing fits."""
    conversion.settings = without_roles_layouts(conversion.settings)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "ours.yaml"
        path.write_text(conversion.yaml("the settings of verl"))
        options = make_parser().parse_args([str(path), *machine, "--top=1"])
        choices, _, text = find_settings(options, keeps_split=True)
    conversion.nodes = options.nodes
    conversion.processes = options.gpus_per_node
    settings = nest_settings({**conversion.settings, **choices[0].settings})
    conversion.settings = dict(flatten_settings(settings))
    return text


def converted(arguments: Sequence[str], machine: Sequence[str]) -> tuple[Conversion, str]:
    """Return the conversion, with a layout for the machine if one is given, and the planner's text.
    Where FSDP2 does not fit, the layout is Megatron's. Raise UserError for a mistake, or if nothing
    fits."""
    conversion = converted_arguments(arguments)
    if not machine or conversion.refused():
        return conversion, ""
    try:
        return conversion, set_layout(conversion, machine)
    except UserError as error:
        if conversion.settings.get("actor.strategy") != "fsdp2":
            raise
        conversion = converted_arguments([*arguments, STRATEGY, "megatron"])
        text = set_layout(conversion, machine)
        return conversion, f"note: layout: Megatron's, not fsdp2: {error}\n{text}"


def main(arguments: list[str]) -> int:
    """Print the config and the report. Return the exit code."""
    machine, arguments = machine_options(arguments)
    if not arguments or arguments[0] in ("-h", "--help"):
        print((__doc__ or "").strip())
        return 0 if arguments else 2
    try:
        conversion, plan = converted(arguments, machine)
    except UserError as error:
        print(f"rlhf_mc: error: {error}", file=sys.stderr)
        return 2
    print("\n".join(filter(None, [masked(conversion.text()), plan])), file=sys.stderr)
    if refused := conversion.refused():
        names = ", ".join(key for key, _ in refused)
        message = f"{len(refused)} settings are not supported, and no config is written: {names}"
        print(
            f"rlhf_mc: error: {message}; remove one with '~key', or change it with key=value",
            file=sys.stderr,
        )
        return 2
    text = conversion.yaml(" and ".join(split_arguments(arguments).files) or "verl's overrides")
    if problem := config_problem(text, conversion.nodes * conversion.processes):
        print(f"rlhf_mc: warning: to be changed before it runs: {problem}", file=sys.stderr)
    print(text, end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
