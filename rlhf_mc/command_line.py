"""The command line of `python -m rlhf_mc`, and the texts that its options print. No torch is
imported here."""

from __future__ import annotations

import difflib
import shlex
from dataclasses import dataclass
from typing import Literal, get_args

import rlhf_mc
from rlhf_mc.config.checks import check_config
from rlhf_mc.config.errors import UserError
from rlhf_mc.config.load import load_config
from rlhf_mc.config.printing import command_without_secrets, commented_yaml, recorded
from rlhf_mc.config.schema import Config
from rlhf_mc.runtime.exit_codes import EXIT_ERROR, EXIT_REQUEUE, EXIT_USER_ERROR
from rlhf_mc.runtime.tool import EXIT_INTERRUPTED
from rlhf_mc.verl.table import key_hint

USAGE = "torchrun --nproc-per-node N -m rlhf_mc CONFIG.yaml [section.key=value ...]"
HELP = f"""\
usage: {USAGE}
       python -m rlhf_mc CONFIG.yaml [section.key=value ...] [--print-config]
       python -m rlhf_mc --check

PPO for language models on Megatron-Core, with vLLM in the same processes. torchrun or srun starts
the ranks; started with python alone, the program has one rank. Launchers that set the environment:

  launch/torchrun_1node.sh CONFIG.yaml [section.key=value ...]       one node
  sbatch slurm/ppo_1node.sh CONFIG.yaml [section.key=value ...]      one node, as a Slurm job
  sbatch slurm/ppo_2nodes.sh CONFIG.yaml [section.key=value ...]     2 nodes
  sbatch slurm/ppo_70b.sh [section.key=value ...]                    8 nodes (launch/slurm_job.sh)

arguments:
  CONFIG.yaml          the settings; configs/ has examples, and `base: other.yaml` inherits
  section.key=value    a setting that replaces the file's; the value is YAML

options:
  -h, --help           print this text
  --version            print the version
  --check              print what this machine has, what it lacks and what that costs; code 1
                       where no run could start
  --print-config       print all settings of CONFIG.yaml with their documentation, as a config that
                       can be loaded

exit codes:
  {0:<3}  the run has finished
  {EXIT_ERROR:<3}  an error
  {EXIT_USER_ERROR:<3}  a mistake in the settings or in a file that they name, reported in one line
  {EXIT_REQUEUE:<3}  the run was asked to stop (SIGTERM, SIGUSR1, Ctrl-C); the same command resumes
  {EXIT_INTERRUPTED:<3}  the run was interrupted (a second Ctrl-C) and has saved nothing

documentation: README.md (usage), docs/debugging.md (messages), docs/metrics.md,
  docs/reliability.md, docs/from_verl.md (settings of verl's)"""

Option = Literal["--help", "--version", "--check", "--print-config"]
SCRIPTS = (".sh", ".bash", ".slurm")
OPTIONS: dict[str, Option] = {"-h": "--help", **{option: option for option in get_args(Option)}}


@dataclass(frozen=True)
class CommandLine:
    """The parsed arguments of the program."""

    config: str
    """The file; "" with --help, --version and --check."""
    overrides: list[str]
    option: Option | None = None
    """The text to print instead of training."""

    def text(self) -> str:
        """Return the text of an option other than --check. Raise UserError if the config cannot be
        loaded, or if no run can have its settings."""
        if self.option == "--help":
            return HELP
        if self.option == "--version":
            return f"rlhf_mc {rlhf_mc.__version__}"
        config = load_config(self.config, self.overrides, key_hint)
        check_config(config, None)
        command = " ".join(
            shlex.join(command_without_secrets([self.config, *self.overrides])).splitlines()
        )
        settings = commented_yaml(config, recorded(config)).rstrip("\n")
        return f"# {command}, resolved by rlhf_mc {rlhf_mc.__version__}\n\n{settings}"


def parse(argv: list[str]) -> CommandLine:
    """Parse the arguments after the program's name. Raise UserError for an unknown option or a
    missing config."""
    given = [argument for argument in argv if argument.startswith("-")]
    for argument in given:
        if argument not in OPTIONS:
            raise UserError(f"unknown option {argument}{_hint(argument)}; --help lists the options")
    options = {OPTIONS[argument] for argument in given}
    option = next((option for option in OPTIONS.values() if option in options), None)
    arguments = [argument for argument in argv if not argument.startswith("-")]
    if option == "--check" and arguments:
        raise UserError(
            f"--check looks at this machine alone, not at {arguments[0]}; python -m "
            "rlhf_mc.planner CONFIG.yaml says whether a run fits"
        )
    if option in ("--help", "--version", "--check"):
        return CommandLine("", [], option)
    for argument in arguments:
        if "=" not in argument and argument.endswith(SCRIPTS):
            raise UserError(
                f"{argument} is a script, not a config or section.key=value; tools/from_verl.py "
                "converts one of verl's"
            )
    if not arguments or "=" in arguments[0]:
        raise UserError(f"usage: {USAGE}; --help explains it")
    return CommandLine(arguments[0], arguments[1:], option)


def config_from_argv(argv: list[str]) -> Config:
    """Return the config of a command line that trains. Raise UserError for a mistake, or an option
    that prints."""
    command = parse(argv)
    if command.option is not None:
        raise UserError(f"{command.option} starts no run; give it to `python -m rlhf_mc`")
    return load_config(command.config, command.overrides, key_hint)


def _hint(argument: str) -> str:
    """Return an explanation of an unknown option, or an empty text."""
    if "=" in argument:
        return f" (a setting has no dashes before it: {argument.lstrip('-')})"
    nearest = difflib.get_close_matches(argument, OPTIONS, n=1)
    return f" (did you mean {nearest[0]}?)" if nearest else ""
