"""Make plain English text of Debian's documentation packages: the training text of docs/real_models.md.

apt-get download anarchism aptitude-doc-en debian-faq debian-handbook jargon-text maint-guide python3.11-doc
python benchmarks/debian_text.py *.deb --out text

Writes OUT/train.jsonl and OUT/held_out.jsonl, one record a page; every twentieth page of a package is held out. A
package gives at most --most characters, its pages in the order of their names, so that none drowns the others.
OUT/tasks is for lm-eval: its lambada_openai, with passages of the held-out pages instead of LAMBADA's. Each ends with
the last word of a sentence, which the 60 to 120 words before it have already said.
"""

from __future__ import annotations

import gzip
import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path

from records import parser_of

MEAGER = 500
"""Pages with fewer characters hold menus and redirections."""
HELD_OUT_EVERY = 20
"""One page in so many is held out."""
PASSAGE = (60, 120)
"""Words that stand before the last one of a passage, at least and at most."""
SHORTEST_LAST_WORD = 5


class _Prose(HTMLParser):
    """Collects the text of a page without its scripts, styles and navigation."""

    skipped = frozenset({"script", "style", "nav", "header", "footer", "head"})
    blocks = frozenset(
        {"p", "div", "li", "h1", "h2", "h3", "h4", "pre", "tr", "dt", "dd", "blockquote"}
    )

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
        for file in english_files(Path(folder) / "usr/share/doc"):
            if file.suffix == ".html":
                yield plain(file.read_text(errors="replace"))
            elif file.name == "jargon.txt.gz":
                yield gzip.decompress(file.read_bytes()).decode(errors="replace")
            elif is_source(file):
                yield file.read_text(errors="replace")


def is_source(file: Path) -> bool:
    """Return True for a page that Sphinx made the HTML from."""
    return "/_sources/" in str(file)


def english_files(folder: Path) -> list[Path]:
    """Return the English files, of those that have a source the source alone."""
    documents = sorted(folder.rglob("*"))
    files = [file for file in documents if file.is_file() and not file.is_symlink()]
    english = [file for file in files if "/en-US/" in str(file)] or files
    return [file for file in english if is_source(file)] or english


def passages(page: str) -> Iterator[str]:
    """Yield passages that end in a word of five letters or more that they contain before."""
    least, most = PASSAGE
    words = re.sub(r"\s+", " ", page).split(" ")
    begin = 0
    for place, word in enumerate(words):
        last = word.rstrip(".")
        is_word = last.isalpha() and len(last) >= SHORTEST_LAST_WORD
        if place - begin < least or not word.endswith(".") or not is_word:
            continue
        before = words[max(begin, place - most) : place]
        # Said just before, the word would be repeated rather than looked up.
        if last in before[:-5]:
            yield " ".join([*before, last])
            begin = place + 1


def write_text(packages: list[Path], most: int, out: Path) -> None:
    """Write train.jsonl and held_out.jsonl, one record a page."""
    with (out / "train.jsonl").open("w") as train, (out / "held_out.jsonl").open("w") as held_out:
        for package in packages:
            n_characters = 0
            n_pages = 0
            for page in pages(package):
                if len(page) <= MEAGER:
                    continue
                n_pages += 1
                is_held_out = n_pages % HELD_OUT_EVERY == 0
                file = held_out if is_held_out else train
                file.write(json.dumps({"text": page}) + "\n")
                n_characters += len(page)
                if n_characters > most:
                    break
            print(f"{package.name}: {n_characters:,} characters")


def write_tasks(held_out: Path, out: Path) -> None:
    """Write lm-eval's lambada_openai with passages of the held-out pages."""
    out.mkdir(exist_ok=True)
    questions = out / "lambada_openai.jsonl"
    lines = []
    for record in held_out.read_text().splitlines():
        for passage in passages(json.loads(record)["text"]):
            lines.append(json.dumps({"text": passage}) + "\n")
    questions.write_text("".join(lines))
    definition = files("lm_eval") / "tasks/lambada/lambada_openai.yaml"
    source = json.dumps({"data_files": {"test": str(questions.resolve())}})
    task = [
        f"include: {definition}",
        "dataset_path: json",
        "dataset_name: null",
        f"dataset_kwargs: {source}",
    ]
    (out / "lambada_openai.yaml").write_text("\n".join(task) + "\n")
    print(f"{questions}: {len(lines)} passages")


def main() -> None:
    """Write the text, then the tasks."""
    parser = parser_of(__doc__, Path("text"))
    parser.add_argument("packages", nargs="+", type=Path)
    parser.add_argument(
        "--most", type=int, default=2_500_000, help="characters of a package (default: %(default)s)"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    write_text(sorted(options.packages), options.most, options.out)
    write_tasks(options.out / "held_out.jsonl", options.out / "tasks")


if __name__ == "__main__":
    main()
