"""Hooks of mkdocs.yml: links into the repository, and formulas as MathML, so that the site needs no other host."""

from __future__ import annotations

import html
import os
import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PAGES = ("launch/README.md", "CONTRIBUTING.md", "CHANGELOG.md")
"""Pages of the repository that are pages of the site too; other files that a page links to are copied."""
LINK = re.compile(r"(?<=\]\()([^)\s:#]+)(?=(?:#[^)\s]*)?\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files outside of docs/ that pages link to, at their place in the repository."""
    for name in PAGES:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    for page in files.documentation_pages():
        for target in LINK.findall(page.content_string):
            name = _in_repository(page, target)
            if (ROOT / name).is_file() and not files.get_file_from_path(_on_site(name)):
                files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Let links that leave docs/, or come from outside, find their target on the site."""

    def moved(link: re.Match[str]) -> str:
        name = _in_repository(page.file, link[1])
        is_file = (ROOT / name).is_file()
        return (
            os.path.relpath(_on_site(name), os.path.dirname(page.file.src_uri))
            if is_file
            else link[1]
        )

    return LINK.sub(moved, markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn formulas into MathML, which browsers show by themselves."""

    def drawn(formula: re.Match[str]) -> str:
        return convert(
            html.unescape(formula[2]), display="block" if formula[1] == "div" else "inline"
        )

    return re.sub(r'(?s)<(span|div) class="arithmatex">\\[(\[](.*?)\\[)\]]</\1>', drawn, content)


def _in_repository(page: File, target: str) -> str:
    folder = os.path.dirname(page.src_uri if page.src_uri in PAGES else f"docs/{page.src_uri}")
    return os.path.normpath(os.path.join(folder, target))


def _on_site(name: str) -> str:
    return name.removeprefix("docs/")
