"""Make plain English text of Debian's documentation packages: the training text of docs/real_models.md.

apt-get download anarchism aptitude-doc-en debian-faq debian-handbook jargon-text maint-guide python3.11-doc
python benchmarks/debian_text.py *.deb --out text

Writes OUT/train.jsonl and OUT/held_out.jsonl, one record a page; every twentieth page of a package is held out. A
package gives at most --most characters, its pages in the order of their names, so that none drowns the others.
OUT/tasks is for lm-eval: its lambada_openai, with passages of the held-out pages instead of LAMBADA's. Each ends with
the last word of a sentence, which the 60 to 120 words before it have already said.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

MEAGER = 500
"""Pages with fewer characters hold menus and redirections."""


class _Prose(HTMLParser):
    """Collects the text of a page without its scripts, styles and navigation."""

    skipped = frozenset({"script", "style", "nav", "header", "footer", "head"})
    blocks = frozenset({"p", "div", "li", "h1", "h2", "h3", "h4", "pre", "tr", "dt", "dd", "blockquote"})

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.inside_skipped = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside_skipped += tag in self.skipped
        if tag in self.blocks:
            self.parts.append("\n\n")

    def handle_endtag(self, tag: str) -> None:
        self.inside_skipped -= tag in self.skipped

    def handle_data(self, data: str) -> None:
        if not self.inside_skipped:
            self.parts.append(re.sub(r"\s+", " ", data))


def plain(page: str) -> str:
    prose = _Prose()
    prose.feed(page)
    return re.sub(r"[ \n]*\n\s*", "\n\n", "".join(prose.parts)).strip()


def pages(package: Path) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg-deb", "-x", package, folder], check=True)
        documents = sorted((Path(folder) / "usr/share/doc").rglob("*"))
        english = [file for file in documents if file.is_file() and not file.is_symlink()]
        if any("/en-US/" in str(file) for file in english):
            english = [file for file in english if "/en-US/" in str(file)]
        sources = [file for file in english if "/_sources/" in str(file)]
        for file in sources or english:
            if file.suffix == ".html":
                yield plain(file.read_text(errors="replace"))
            elif file.name == "jargon.txt.gz":
                yield gzip.decompress(file.read_bytes()).decode(errors="replace")
            elif file in sources:
                yield file.read_text(errors="replace")


def passages(page: str) -> Iterator[str]:
    """Yield passages that end in a word of five letters or more that they contain before."""
    words, begun = re.sub(r"\s+", " ", page).split(" "), 0
    for n, word in enumerate(words):
        last = word.rstrip(".")
        if n - begun >= 60 and word.endswith(".") and last.isalpha() and len(last) >= 5:
            before = words[max(begun, n - 120) : n]
            if last in before[:-5]:
                yield " ".join([*before, last])
                begun = n + 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", nargs="+", type=Path)
    parser.add_argument("--most", type=int, default=2_500_000, help="characters of a package (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("text"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    with (options.out / "train.jsonl").open("w") as train, (options.out / "held_out.jsonl").open("w") as held_out:
        for package in sorted(options.packages):
            written = 0
            for n, page in enumerate(page for page in pages(package) if len(page) > MEAGER):
                (held_out if n % 20 == 19 else train).write(json.dumps({"text": page}) + "\n")
                written += len(page)
                if written > options.most:
                    break
            print(f"{package.name}: {written:,} characters")
    tasks = options.out / "tasks"
    tasks.mkdir(exist_ok=True)
    questions = tasks / "lambada_openai.jsonl"
    held_out_pages = map(json.loads, (options.out / "held_out.jsonl").read_text().splitlines())
    found = [passage for record in held_out_pages for passage in passages(record["text"])]
    questions.write_text("".join(json.dumps({"text": passage}) + "\n" for passage in found))
    definition = files("lm_eval") / "tasks/lambada/lambada_openai.yaml"
    source = json.dumps({"data_files": {"test": str(questions.resolve())}})
    task = f"include: {definition}\ndataset_path: json\ndataset_name: null\ndataset_kwargs: {source}\n"
    (tasks / "lambada_openai.yaml").write_text(task)
    print(f"{questions}: {len(found)} passages")


if __name__ == "__main__":
    main()
