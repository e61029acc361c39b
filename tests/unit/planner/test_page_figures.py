"""Names and figures on the pages that the code knows: the pages give what the program does."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Callable, Iterator

import pytest
from documents import ROOT, joined

from rlhf_mc.config.health_schema import HealthConfig
from rlhf_mc.config.load import load_config
from rlhf_mc.config.schema import get_setting
from rlhf_mc.observability.catalog import undeclared
from rlhf_mc.observability.step_table import COLUMNS
from rlhf_mc.planner.__main__ import main as planner
from rlhf_mc.planner.published import MODELS
from rlhf_mc.topology.groups import _group_ranks
from rlhf_mc.topology.mesh import Mesh
from rlhf_mc.topology.open_files import needed


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def section(name: str, title: str) -> str:
    """Return the text below a heading of a page, up to the next heading."""
    return page(name).partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """Return the cells of the rows of the tables in a text, without their headers."""
    lines = [
        re.split(r"(?<!\\)\|", line[1:-1]) for line in text.splitlines() if line.startswith("| ")
    ]
    return [[cell.strip() for cell in line] for line in lines[1:]]


def test_the_phases_of_the_architecture_page_are_the_lines_of_the_loop() -> None:
    tree = ast.parse((ROOT / "rlhf_mc" / "trainer" / "loop.py").read_text())
    (step,) = (
        node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "one_step"
    )
    (timed,) = (node for node in step.body if isinstance(node, ast.With))

    def calls(body: list[ast.stmt]) -> Iterator[str]:
        for statement in body:
            if isinstance(statement, ast.With | ast.If):
                yield from calls(statement.body)
            else:
                yield ast.unparse(statement.value.func)  # type: ignore[attr-defined]

    called = list(calls(timed.body))
    table = rows(section("architecture", "Phases"))
    assert [name.strip("`") for name, *_ in table] == called
    for _, file, _, times, _ in table:
        assert (ROOT / "rlhf_mc" / file.strip("`")).is_file()
        assert undeclared(f"timing_s/{name}" for name in re.findall(r"`(\w+)`", times)) == []


def test_the_columns_of_the_console_are_explained() -> None:
    table = {
        name.strip("`"): text for name, text in rows(section("watching", "The table of steps"))
    }
    assert list(table) == [column.title for column in COLUMNS]
    for column in COLUMNS:
        assert [key for key in column.keys if f"`{key}`" not in table[column.title]] == []


def test_thresholds_of_the_debugging_page_are_those_of_the_health_rules() -> None:
    assert f"| `response_length/clip_ratio` above {HealthConfig().truncated_max} |" in page(
        "debugging"
    )


def my_groups(mesh: Mesh) -> set[tuple[int, ...]]:
    """Return the training groups of rank 0 but the world's."""
    groups = {
        tuple(ranks) for lists in _group_ranks(mesh).values() for ranks in lists if 0 in ranks
    }
    return groups - {tuple(range(mesh.world))}


@pytest.mark.parametrize(
    ("column", "mesh", "rollout_tp"),
    [(2, Mesh(4, 2, 2), 2), (3, Mesh(64, 8, 4), 8), (4, Mesh(512, 8, 4), 8)],
    ids=str,
)
def test_open_files_of_rank_0(column: int, mesh: Mesh, rollout_tp: int) -> None:
    world = mesh.world
    files = [
        world + 3,
        world + 3,
        sum(len(ranks) + 3 for ranks in my_groups(mesh)),
        rollout_tp + 27,
        world,
        world,
    ]
    expected = [*files, sum(files), needed(world, 0), needed(world, 1)]
    assert [int(row[column]) for row in rows(page("internals/open_files"))] == expected


@pytest.mark.parametrize("world", [8, 64, 128])
def test_the_training_groups_of_a_layout_have_less_than_twice_the_members_of_the_world(
    world: int,
) -> None:
    """Check what topology/open_files.py relies on, for all layouts in powers of two."""
    sizes = [2**power for power in range(world.bit_length())]
    layouts = [
        (tp, pp, ep) for tp in sizes for pp in sizes for ep in sizes if tp * pp * ep <= world
    ]
    members = {layout: sum(map(len, my_groups(Mesh(world, *layout)))) for layout in layouts}
    assert max(members.values()) < 2 * world


def test_the_plan_of_the_cluster_page_is_the_planners(capsys: pytest.CaptureFixture[str]) -> None:
    block = (
        joined(page("cluster"))
        .partition("$ launch/tool.sh -m rlhf_mc.planner ")[2]
        .partition("```")[0]
    )
    command, _, output = block.partition("\n")
    arguments = [word for word in shlex.split(command) if not word.startswith("model.path=")]
    assert planner([*arguments, "--model", "llama-3-70b"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [
        line for line in output.splitlines() if line.strip() != "..." and line not in printed
    ] == []


@pytest.mark.slow
@pytest.mark.parametrize("row", rows(section("planner", "Times")), ids=lambda row: row[0])
def test_what_is_reachable_for_70b(row: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    config, *overrides = " ".join(re.findall(r"`([^`]+)`", row[0])).split()
    critic = [f"critic.model_path={MODELS}/llama-3-8b"] if "8b_critic" in config else []
    arguments = [str(ROOT / "configs" / f"{config}.yaml"), "--model", "llama-3-70b", "--nodes", "8"]
    assert planner([*arguments, *overrides, *critic, "--json"]) == 0
    times = json.loads(capsys.readouterr().out)["times"]
    each = [plan["tokens_per_second_per_gpu"] for plan in (times, times["expected"])]
    assert row[1:] == [f"{times['step_seconds']:.1f} s", *(f"{tokens:.0f}" for tokens in each)]


AS_SHIPPED = "as the config has it"
LAYOUT_KEYS = (
    "actor.megatron.tensor_model_parallel_size",
    "actor.megatron.pipeline_model_parallel_size",
    "actor.megatron.virtual_pipeline_model_parallel_size",
    "actor.megatron.expert_model_parallel_size",
    "rollout.tensor_model_parallel_size",
    "actor.ppo_max_token_len_per_gpu",
)


def layout_rows() -> list[tuple[list[str], list[str]]]:
    """Return the planner's arguments and the cells of each row of the page of layouts. A row of a
    config as it is has the arguments of the search above it, or a model of its own."""
    table = []
    arguments: list[str] = []
    for name, nodes, *cells in rows(section("layouts", "The planner's answers")):
        is_shipped = name.endswith(("as it is", AS_SHIPPED))
        if name != AS_SHIPPED:
            config, model = name.removesuffix(", as it is").split(", ")
            size = ["--gpus-per-node", "1"] if nodes == "1 GPU" else ["--nodes", nodes]
            arguments = [
                str(ROOT / "configs" / f"{config.strip('`')}.yaml"),
                "--model",
                model,
                *size,
            ]
        table.append((arguments if is_shipped else [*arguments, "--search", "--top", "1"], cells))
    return table


def cells_of(setting: Callable[[str], object], seconds: float, spare: float) -> list[str]:
    """Return the cells of a row but the offload's."""
    tp, pp, chunks, ep, rollout_tp, tokens = map(setting, LAYOUT_KEYS)
    stages = f"{pp} ({chunks})" if chunks not in (None, 1) else str(pp)
    return [
        str(tp),
        stages,
        str(ep),
        str(rollout_tp),
        str(tokens),
        f"{seconds:.1f} s",
        f"{spare / 1e9:.1f}",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "cells"), [row for row in layout_rows() if "--search" not in row[0]]
)
def test_layouts_of_the_configs(
    arguments: list[str], cells: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert planner([*arguments, "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    cfg = load_config(arguments[0], [])
    found = cells_of(
        lambda key: get_setting(cfg, key), plan["times"]["step_seconds"], plan["spare_bytes"]
    )
    assert [*cells[:5], *cells[6:]] == found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "cells"), [row for row in layout_rows() if "qwen2.5-0.5b" in row[0]]
)
def test_layouts_that_the_search_finds(
    arguments: list[str], cells: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert planner([*arguments, "--json"]) == 0
    (choice,) = json.loads(capsys.readouterr().out)
    settings = choice["settings"]
    found = cells_of(settings.get, choice["times"]["step_seconds"], choice["spare_bytes"])
    assert [*cells[:5], *cells[6:]] == found
