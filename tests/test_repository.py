"""The files around the code keep their promises: the README's links, the launch files."""

import re
import runpy
from pathlib import Path

import pytest
from accelerate.commands.config.config_args import load_config_from_file

ROOT = Path(__file__).parent.parent
LAUNCH_FILES = sorted((ROOT / "launch").glob("*.yaml"))


def test_every_file_that_the_architecture_names_exists() -> None:
    """And every folder of the package has a place in its picture."""
    text = (ROOT / "docs/architecture.md").read_text()
    gone = [
        name
        for name in re.findall(r"`([\w/]+\.py)`", text)
        if not (ROOT / "hybrid_distill" / name).is_file()
    ]
    assert not [name for name in gone if not (ROOT / name).is_file()]
    picture = text.split("```")[1]
    folders = [
        path.name for path in (ROOT / "hybrid_distill").iterdir() if (path / "__init__.py").exists()
    ]
    assert all(f"{name}/" in picture for name in folders)


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("launch/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_links_to_what_is_there(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = {target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text)}
    gone = [
        target
        for target in targets
        if target and "://" not in target and not (page.parent / target).exists()
    ]
    assert not gone


@pytest.mark.parametrize("path", LAUNCH_FILES, ids=lambda path: path.stem)
def test_a_launch_file_describes_a_machine_and_nothing_else(path: Path) -> None:
    text = path.read_text()
    load_config_from_file(str(path))
    for science in (
        "mixed_precision",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "bf16",
    ):
        assert f"{science}:" not in text, (
            "the recipe decides it: two owners would disagree in silence"
        )
    if "DEEPSPEED" in text:
        assert "deepspeed_multinode_launcher: standard" in text, "pdsh would train on one machine"
        assert "zero3_init_flag: false" in text
        assert "zero_stage: 3" not in text or "zero3_save_16bit_model: true" in text


def test_the_figure_of_the_readme_shows_the_measured_numbers() -> None:
    figure = runpy.run_path(str(ROOT / "docs/method_figure.py"))["method_figure"]()
    assert (ROOT / "docs/method.svg").read_text() == figure, "run `python docs/method_figure.py`"
    assert figure.count('class="lit"') == 48 + 6


def test_hooks_before_a_commit_run_the_versions_of_make_lint() -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    versions = re.findall(r"repo: .*/(ruff|codespell)(?:-pre-commit)?\n    rev: v(.*)", hooks)
    assert len(versions) == 2
    for tool, version in versions:
        assert f"\n{tool}=={version}\n" in constraints


def test_every_launch_file_is_explained() -> None:
    explained = (ROOT / "launch/README.md").read_text()
    assert LAUNCH_FILES
    for path in LAUNCH_FILES:
        assert f"`{path.name}`" in explained
