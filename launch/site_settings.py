"""Read the site file: container, modules, srun options and environment variables of one cluster.

    python3 launch/site_settings.py check  # what the launchers would use, or the first mistake
    python3 launch/site_settings.py shell  # as bash assignments, which launch/site.sh evaluates

The site file is the one that RLHF_MC_SITE names, or site.ini in the repository's root.
launch/site.example.ini has every setting. The node's own Python reads the file, before a module or
a container brings another: this module needs Python 3.7 and its standard library alone, and the
file is INI, which that library reads.
"""

from __future__ import annotations

import configparser
import difflib
import os
import re
import shlex
import socket
import string
import sys
from collections.abc import Sequence
from dataclasses import dataclass

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
SECTIONS = {
    "container": ("runtime", "image", "mounts", "options"),
    "launch": ("python", "modules", "srun_options"),
    "environment": (),  # any variable
}
BINARIES = ("apptainer", "singularity")
"""Runtimes that are a command before the program's; pyxis adds options to srun."""
RUNTIMES = ("pyxis", *BINARIES)
LAUNCHERS_SRUN_OPTIONS = (
    *("-N", "--nodes", "-n", "--ntasks", "--ntasks-per-node", "-c", "--cpus-per-task"),
    *("-K", "--kill-on-bad-exit", "--cpu-bind"),
)
LAUNCHERS_CONTAINER_OPTIONS = {
    "--container-image": "image",
    "--container-mounts": "mounts",
    "--bind": "mounts",
    "-B": "mounts",
    "--container-name": "",
    "--container-workdir": "",
    "--container-env": "",
    "--pwd": "",
    "--cwd": "",
}
"""Container options that the launchers set, with the key of [container] that changes them."""
CLEARING_OPTIONS = ("-e", "--cleanenv", "-C", "--containall", "-c", "--contain")
"""Options with which a container would see neither the launcher's variables nor the node's /dev and
/tmp."""
LAUNCHERS_VARIABLES = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|LOG_DIR|RLHF_MC_EXIT_CODE_FILE|RLHF_MC_SITE|"
    r"RLHF_MC_CONTAINER|PYTHON|SLURM_\w*)"
)
SET_ON_EVERY_NODE = ("PATH", "LD_LIBRARY_PATH", "HOME", "USER")


class SiteError(ValueError):
    """A mistake in the site file. The message is one line."""


@dataclass(frozen=True)
class Container:
    """The container in which all steps of a job run."""

    runtime: str
    image: str
    mounts: tuple[tuple[str, str, str], ...]
    """Source, target, and `ro` or `rw`."""
    options: tuple[str, ...]


@dataclass(frozen=True)
class Site:
    """The settings of a site file."""

    container: Container | None
    python: str
    """The interpreter, in the container where there is one; empty: the launcher's default."""
    modules: tuple[str, ...]
    srun_options: tuple[str, ...]
    environment: dict[str, str]


def read(file: str) -> Site:
    """Read a site file. Raise SiteError for a mistake in it; the paths that it names are not
    accessed."""
    sections = _sections(file)
    launch = sections.get("launch", {})
    srun_options = _words(launch, "launch", "srun_options")
    for option in (word for word in srun_options if word.startswith("-")):
        name = option.partition("=")[0]
        if name in LAUNCHERS_SRUN_OPTIONS or re.match(r"-[Nnc]\d", option):
            raise SiteError(
                f"[launch] srun_options: the launchers set {name} themselves, from sbatch's options"
            )
        if re.match(r"--(no-)?container-", name):
            raise SiteError(f"[launch] srun_options: {name} belongs to [container]")
    if srun_options and not srun_options[0].startswith("-"):
        raise SiteError(
            f"[launch] srun_options begins with {srun_options[0]!r}; an option begins with -"
        )
    return Site(
        _container(sections["container"]) if "container" in sections else None,
        launch.get("python", ""),
        _words(launch, "launch", "modules"),
        srun_options,
        _environment(sections.get("environment", {})),
    )


def _sections(file: str) -> dict[str, dict[str, str]]:
    """Return the sections of the file, with $NAME replaced. Raise SiteError for a key that does not
    exist."""
    parser = configparser.RawConfigParser(
        default_section="", inline_comment_prefixes=("#",), delimiters=("=",)
    )
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    try:
        with open(file) as lines:
            parser.read_file(lines)
    except OSError as error:
        raise SiteError(f"{error.strerror}; RLHF_MC_SITE names the site file") from None
    except UnicodeDecodeError:
        raise SiteError("not a text file") from None
    except configparser.Error as error:
        raise SiteError(" ".join(str(error).split())) from None
    found: dict[str, dict[str, str]] = {}
    for section in parser.sections():
        if section not in SECTIONS:
            raise SiteError(f"unknown section [{section}]{_nearest(section, list(SECTIONS))}")
        known = SECTIONS[section]
        for key, value in parser.items(section):
            if known and key not in known:
                raise SiteError(f"[{section}] has no key {key}{_nearest(key, known)}")
            if not value:
                raise SiteError(f"[{section}] {key} is empty; give a value, or leave the line out")
            found.setdefault(section, {})[key] = _replaced(section, key, value)
        found.setdefault(section, {})
    return found


def _nearest(name: str, known: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, known, n=1)
    return f" (did you mean {nearest[0]}?)" if nearest else f"; known are {', '.join(known)}"


def _replaced(section: str, key: str, value: str) -> str:
    try:
        return string.Template(value).substitute(os.environ)
    except KeyError as error:
        raise SiteError(
            f"[{section}] {key}: the environment has no variable {error.args[0]}"
        ) from None
    except ValueError:
        raise SiteError(
            f"[{section}] {key} is {value!r}; write $NAME for a variable, and $$ for a dollar"
        ) from None


def _words(section: dict[str, str], name: str, key: str) -> tuple[str, ...]:
    """Return the words of a value, split as a shell splits them."""
    try:
        return tuple(shlex.split(section.get(key, "")))
    except ValueError as error:
        raise SiteError(f"[{name}] {key}: {error}".lower()) from None


def _container(section: dict[str, str]) -> Container:
    for key in ("runtime", "image"):
        if key not in section:
            raise SiteError(f"[container] needs {key}; without a container leave the section out")
    runtime = section["runtime"]
    image = section["image"]
    if runtime not in RUNTIMES:
        raise SiteError(
            f"[container] runtime is {runtime!r}; it must be one of {', '.join(RUNTIMES)}"
        )
    if not image.startswith("/") and re.search(r"\.(sqsh|sif|squashfs)$", image):
        raise SiteError(f"[container] image is {image!r}; the path of a file must begin with /")
    if " " in image:
        raise SiteError(f"[container] image is {image!r}; it must have no blanks")
    options = _words(section, "container", "options")
    for option in options:
        name = option.partition("=")[0]
        if name in LAUNCHERS_CONTAINER_OPTIONS:
            key = LAUNCHERS_CONTAINER_OPTIONS[name]
            what = f"it is the key {key}" if key else "the launchers set it themselves"
            raise SiteError(f"[container] options: {name}: {what}")
        if runtime == "pyxis" and not re.match(r"--(no-)?container-", name):
            raise SiteError(
                f"[container] options: {name} is no option of pyxis; other options: [launch] "
                "srun_options"
            )
        if runtime != "pyxis" and name in CLEARING_OPTIONS:
            raise SiteError(
                f"[container] options: {name} would hide the launcher's variables and devices; "
                "leave it out"
            )
    return Container(
        runtime, image, tuple(_mount(word) for word in section.get("mounts", "").split()), options
    )


def _mount(text: str) -> tuple[str, str, str]:
    source, *rest = text.split(":")
    target = rest[0] if rest else source
    mode = rest[1] if len(rest) > 1 else "rw"
    if (
        "," in text
        or len(rest) > 2
        or mode not in ("ro", "rw")
        or not (source[:1] == target[:1] == "/")
    ):
        raise SiteError(
            f"[container] mounts: {text!r}; write SOURCE, SOURCE:TARGET or SOURCE:TARGET:ro with "
            "absolute paths, separated by blanks or lines"
        )
    return source, target, mode


def _environment(section: dict[str, str]) -> dict[str, str]:
    for name, value in section.items():
        if not re.match(r"[A-Za-z_]\w*$", name):
            raise SiteError(f"[environment] {name!r} is no name of a variable")
        if LAUNCHERS_VARIABLES.fullmatch(name):
            where = "; it is [launch] python" if name == "PYTHON" else ""
            raise SiteError(f"[environment] {name}: the launchers set it themselves{where}")
        if name in SET_ON_EVERY_NODE:
            raise SiteError(
                f"[environment] {name} is set on every node; a module or the image changes it"
            )
        if "\n" in value:
            raise SiteError(f"[environment] {name} has several lines")
    return dict(section)


def check_paths(site: Site) -> None:
    """Raise SiteError if the image or the source of a mount does not exist on this machine."""
    if site.container is None:
        return
    here = f"does not exist on {socket.gethostname()}"
    if site.container.image.startswith("/") and not os.path.exists(site.container.image):
        raise SiteError(f"[container] image {site.container.image} {here}")
    for source, _, _ in site.container.mounts:
        if not os.path.exists(source):
            raise SiteError(f"[container] mounts: {source} {here}")


def mounts(container: Container, log_root: str) -> list[tuple[str, str, str]]:
    """Return all mounts: those of the file, the repository, the current directory and the logs'
    folder, each at its own path unless another mount has it there."""
    own = [ROOT, os.getcwd(), *([os.path.abspath(log_root)] if log_root else [])]
    found = list(container.mounts)
    for path in own:
        inside = (
            f"{path}/".startswith(f"{target}/")
            for source, target, mode in found
            if source == target and mode == "rw"
        )
        if not any(inside):
            found.append((path, path, "rw"))
    return found


def srun_options(site: Site, log_root: str) -> list[str]:
    """Return the options for each srun.

    --container-name: the container is unpacked once on each node of a job, not once for each step.
    --no-container-entrypoint: the image's entrypoint is a launcher.
    --container-env: without it a variable of the image wins over the site's (pyxis 0.15 or
    later)."""
    found = list(site.srun_options)
    container = site.container
    if container is None or container.runtime != "pyxis":
        return found
    listed = (
        "{}:{}".format(*mount[:2]) + ":ro" * (mount[2] == "ro")
        for mount in mounts(container, log_root)
    )
    found += [
        f"--container-image={container.image}",
        f"--container-name=rlhf_mc_{os.environ.get('SLURM_JOB_ID', 'JOB')}",
        f"--container-mounts={','.join(listed)}",
        f"--container-workdir={os.getcwd()}",
        "--no-container-entrypoint",
    ]
    if site.environment:
        found.append(f"--container-env={','.join(site.environment)}")
    return found + list(container.options)


def wrapper(site: Site, log_root: str) -> list[str]:
    """Return the command that goes before the program's; empty without Apptainer."""
    container = site.container
    if container is None or container.runtime == "pyxis":
        return []
    binds = [["--bind", ":".join(mount)] for mount in mounts(container, log_root)]
    flat = [word for bind in binds for word in bind]
    return [
        container.runtime,
        "exec",
        "--nv",
        *flat,
        "--pwd",
        os.getcwd(),
        *container.options,
        container.image,
    ]


def variables(site: Site) -> dict[str, str]:
    """Return the variables to export: those of the site file that the environment lacks. For
    Apptainer each has a copy with the prefix that makes it win over the image's (--env would split
    a value at its commas)."""
    found = {name: os.environ.get(name, value) for name, value in site.environment.items()}
    container = site.container
    if container is None:
        return found
    if container.runtime != "pyxis":
        found.update(
            {f"{container.runtime.upper()}ENV_{name}": value for name, value in list(found.items())}
        )
    # The code is the repository's, although the image has a copy; packages in the user's home
    # directory are the host's.
    return {
        **found,
        "PYTHONPATH": ROOT,
        "PYTHONNOUSERSITE": "1",
        "RLHF_MC_CONTAINER": container.runtime,
    }


def shell(site: Site) -> str:
    """Return the settings as bash assignments."""
    exported = variables(site)
    log_root = exported.get("LOG_ROOT", os.environ.get("LOG_ROOT", ""))
    arrays = {
        "site_modules": site.modules,
        "site_srun": srun_options(site, log_root),
        "site_wrapper": wrapper(site, log_root),
    }
    lines = [f"export {name}={shlex.quote(value)}" for name, value in exported.items()]
    lines += [f"{name}=({' '.join(map(shlex.quote, words))})" for name, words in arrays.items()]
    lines.append(f"site_python={shlex.quote(site.python or ('python3' if site.container else ''))}")
    return "\n".join(lines)


def description(site: Site) -> str:
    """Return what the launchers would use, for people."""
    exported = variables(site)
    log_root = exported.get("LOG_ROOT", os.environ.get("LOG_ROOT", ""))
    container = site.container
    lines = [
        f"container     {f'{container.image} ({container.runtime})' if container else 'none'}",
        f"modules       {' '.join(site.modules) or 'none'}",
        (
            "srun          "
            f"{' '.join(map(shlex.quote, srun_options(site, log_root))) or 'no further options'}"
        ),
    ]
    if container is not None and container.runtime != "pyxis":
        lines.append(f"each rank     {' '.join(map(shlex.quote, wrapper(site, log_root)))} ...")
    lines.append(f"python        {site.python or 'the default of the launchers'}")
    for name, value in site.environment.items():
        kept = (
            ""
            if exported[name] == value
            else f"    (the environment has this value; the file has {value})"
        )
        lines.append(f"environment   {name}={exported[name]}{kept}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Run a command. Return the exit code."""
    file = os.environ.get("RLHF_MC_SITE") or os.path.join(ROOT, "site.ini")
    if list(argv) not in (["check"], ["shell"]):
        print("usage: python3 launch/site_settings.py check|shell", file=sys.stderr)
        return 2
    try:
        site = read(file)
        check_paths(site)
    except SiteError as error:
        print(f"site: error: {file}: {error}", file=sys.stderr)
        return 2
    print(shell(site) if argv[0] == "shell" else f"{file}\n{description(site)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
