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
    package = ROOT / "hybrid_distill"
    text = (ROOT / "docs/architecture.md").read_text()
    for name in re.findall(r"`([\w/]+\.py)`", text):
        is_there = (package / name).is_file() or (ROOT / name).is_file()
        assert is_there, name

    picture = text.split("```")[1]
    for path in package.iterdir():
        if (path / "__init__.py").exists():
            assert f"{path.name}/" in picture


PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("launch/*.md")])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_links_to_what_is_there(page: Path) -> None:
    without_code = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", without_code):
        target, _, _ = link.partition("#")
        # A place on this page, or another site.
        if not target or "://" in target:
            continue
        assert (page.parent / target).exists(), target


NAMED_FILE = re.compile(
    r"(?<![\w/.-])(?:hybrid_distill|kernels|tests|benchmarks|recipes|launch|examples|docs)"
    r"/[\w/]+\.(?:py|yaml|sbatch|sh|md)\b"
)
PLACEHOLDER = re.compile(r"NAME|/my_")
NAMING = [*PAGES, ROOT / "Makefile", ROOT / "noxfile.py", *ROOT.glob(".github/**/*.yml")]
for _folder in ("hybrid_distill", "kernels", "benchmarks", "launch"):
    NAMING += [path for path in (ROOT / _folder).rglob("*") if path.suffix in (".py", ".sh")]


def test_files_that_pages_and_comments_name_exist() -> None:
    """A renamed file leaves its old name behind in prose, where nothing else looks."""
    missing = []
    n_named = 0
    for source in NAMING:
        for name in NAMED_FILE.findall(source.read_text()):
            n_named += 1
            if not PLACEHOLDER.search(name) and not (ROOT / name).exists():
                missing.append(f"{source.relative_to(ROOT)}: {name}")
    assert n_named > 100
    assert missing == []


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
