"""The pages: their links lead somewhere, the files, settings and metrics that they name exist, and
the messages that docs/debugging.md quotes are those of the source."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from checks import metrics_page, settings_page, tests_page
from checks.wrap import PAGES, wrapped
from documents import ROOT, joined

from rlhf_mc.config.load import dotted_keys
from rlhf_mc.observability.catalog import expanded, undeclared
from rlhf_mc.planner.__main__ import make_parser as planner_parser

NOT_WRAPPED: set[str] = set()
"""Pages that are still as wide as they were written."""
READINGS = ROOT / "docs" / "internals" / "gpu_readings.md"
"""A page that names files of other libraries."""
NO_SETTINGS = {
    "reward_model.ground_truth",
    "health.jsonl",
    "rollout.py",
    "model.language_model.*",
    "model.visual.*",
}
"""A column of the data, files and tensors, which look like settings."""
GROUPS = "actor|critic|training|response_length|global_seqlen|timing_s|perf|memory|reshard|val-core"
"""First parts of metric keys."""
SECTIONS = {key.partition(".")[0] for key in dotted_keys()}


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        headings = re.findall(r"^#+ (.*)", file.read_text(), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {
            re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in headings
        }, target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_settings_that_a_page_names_exist(page: Path) -> None:
    """Compare names in backticks that begin with a section; {a,b} are alternatives, * any text."""
    known = [*dotted_keys(), *SECTIONS]
    for quoted in re.findall(r"`([^`\n]+)`", page.read_text()):
        for text in expanded(quoted):
            found = re.match(r"([a-z_]+(?:\.[a-z_*]+)+)(?=$|[=: ])", text)
            if (
                found is None
                or found[1].partition(".")[0] not in SECTIONS
                or found[1] in NO_SETTINGS
            ):
                continue
            pattern = re.escape(found[1]).replace(r"\*", ".+")
            assert any(re.match(rf"{pattern}(\.|$)", key) for key in known), quoted


@pytest.mark.parametrize("page", [p for p in PAGES if p != READINGS], ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    """Compare paths in backticks, from the repository's root or within rlhf_mc; <name> and * are
    any text."""
    for path in re.findall(r"`([\w./*<>-]+/[\w.*<>-]+\.(?:py|md|yaml|sh|toml))`", page.read_text()):
        pattern = re.sub(r"<\w+>", "*", path)
        assert any([*ROOT.glob(pattern), *(ROOT / "rlhf_mc").glob(pattern)]), path


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_prose_is_wrapped_at_one_width(page: Path) -> None:
    if page not in {ROOT / "docs" / f"{name}.md" for name in NOT_WRAPPED}:
        assert page.read_text() == wrapped(page.read_text()), "run python tests/checks/wrap.py"


def test_each_page_answers_a_question_of_the_readme() -> None:
    """Compare with the links of README's first table."""
    table = (ROOT / "README.md").read_text().partition("| question |")[2].partition("\n\n")[0]
    linked = {target.partition("#")[0] for target in re.findall(r"\]\(([^)]+)\)", table)}
    assert {name_of(page) for page in (ROOT / "docs").glob("*.md")} <= linked
    assert {"docs/decisions", "docs/internals"} <= linked


def test_metrics_that_pages_name_are_explained() -> None:
    named = set()
    for page in (ROOT / "docs" / "debugging.md", ROOT / "docs" / "internals" / "recipes.md"):
        for quoted in re.findall(r"`([^`\n]+)`", page.read_text()):
            if re.fullmatch(rf"({GROUPS})/\S+", quoted):
                named |= set(expanded(quoted))
    named = {key for key in named if not key.endswith("/*")}
    assert len(named) > 10 and undeclared(re.sub(r"(?<=@)[Nk]\b", "4", key) for key in named) == []


def test_the_pages_of_metrics_and_health_are_made_of_their_declarations() -> None:
    for path, text in metrics_page.pages().items():
        assert path.read_text() == text, "run python tests/checks/metrics_page.py"


def test_the_page_of_tests_is_made_of_their_docstrings() -> None:
    assert tests_page.PATH.read_text() == tests_page.page(), "run python tests/checks/tests_page.py"


def test_the_page_of_settings_is_made_of_their_dataclasses() -> None:
    text = settings_page.PATH.read_text()
    assert text == settings_page.page(), "run python tests/checks/settings_page.py"
    rows = set(re.findall(r"^\| `([\w.]+)` \|", text, re.MULTILINE))
    sections = set(re.findall(r"^##+ ([\w.]+)$", text, re.MULTILINE))
    repeated = {
        "critic.lora",
        "critic.optim",
        "critic.fsdp_config",
        "critic.megatron",
        "ref.fsdp_config",
        "ref.megatron",
        "reward_model.fsdp_config",
        "reward_model.megatron",
        "reward_models.NAME",
        "distillation.teacher_models.NAME.fsdp_config",
        "distillation.teacher_models.NAME.megatron",
    }
    assert {key.rpartition(".")[0] for key in rows} | {"reward_models.NAME"} | repeated == sections
    assert rows == {
        key for key in dotted_keys() if not key.startswith(tuple(f"{name}." for name in repeated))
    }


def literals() -> set[str]:
    """Return the constant texts of the program and its launchers, split where values are
    inserted."""
    found = set()
    for path in [*(ROOT / "rlhf_mc").rglob("*.py"), *(ROOT / "launch").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.update(re.split(r"%[-.\d]*[sdgf]", node.value))
    return found


def written_in(known: set[str]) -> Callable[[str], bool]:
    """Return a function: whether a text is part of one of the known ones, or the end of one, whole
    ones, and the start of one."""
    beginnings = {part[:at] for part in known for at in range(len(part) + 1)}
    ends = {part[at:] for part in known for at in range(len(part))}
    all_text = "\n".join(known)

    def follows(rest: str) -> bool:
        return rest in beginnings or any(
            rest[:at] in known and follows(rest[at:]) for at in range(1, len(rest))
        )

    def is_written(text: str) -> bool:
        return text in all_text or any(
            text[:at] in ends and follows(text[at:]) for at in range(1, len(text))
        )

    return is_written


def test_messages_that_a_page_quotes_are_in_the_source() -> None:
    """Compare the ```text blocks, one message each; … and numbers stand for inserted values."""
    page = (ROOT / "docs" / "debugging.md").read_text()
    messages = [
        " ".join(text.split())
        for text in re.findall(r"^```text\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL)
    ]
    assert len(messages) == page.count("```text") > 10
    is_written = written_in({part for part in literals() if len(part) > 1})
    for message in messages:
        for part in re.split(r"…|\d+", message.removeprefix("rlhf_mc: ")):
            assert not re.search("[a-z]", part) or is_written(part.strip()), f"{part!r}: {message}"


def commands_of(page: Path) -> list[list[str]]:
    """Return the words of each command in the ```console blocks, without assignments before it."""
    blocks = re.findall(
        r"^```console\n(.*?)^```$", joined(page.read_text()), re.MULTILINE | re.DOTALL
    )
    lines = [
        shlex.split(line[2:])
        for block in blocks
        for line in block.splitlines()
        if line.startswith("$ ")
    ]
    return [
        list(itertools.dropwhile(lambda word: re.match(r"[A-Z_]+=", word), line)) for line in lines
    ]


@pytest.mark.parametrize(("page", "least"), [("cluster", 20), ("gsm8k", 8)])
def test_commands_of_a_page_can_be_given(page: str, least: int) -> None:
    """Check that programs, configs, options and settings of the commands exist."""
    commands = commands_of(ROOT / "docs" / f"{page}.md")
    assert len(commands) >= least
    options_of_tools = (ROOT / "rlhf_mc" / "checkpoint" / "convert.py").read_text()
    for command in commands:
        for word in command:
            if (
                re.match(r"(launch|slurm|tools|configs)/", word)
                and command[command.index(word) - 1] != "--write"
            ):
                assert (ROOT / word).exists(), word
            if re.match(rf"({'|'.join(SECTIONS)})\.[\w.]+=", word):
                assert word.partition("=")[0] in dotted_keys(), word
        if "rlhf_mc.planner" in command:
            arguments = command[command.index("rlhf_mc.planner") + 1 :]
            assert planner_parser().parse_intermixed_args(arguments).nodes > 0
        tool = next((word for word in command if word.startswith("tools/")), None)
        if tool is not None:
            source = (ROOT / tool).read_text() + options_of_tools
            for option in command[command.index(tool) + 1 :]:
                assert not option.startswith("--") or f'"{option}"' in source, option
