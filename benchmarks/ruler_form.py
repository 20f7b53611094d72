"""Tasks in RULER's form that the embedded teacher can learn, and how much of them students keep.

    python benchmarks/ruler_form.py --out runs/ruler_form    # resumes; writes benchmarks/results/ruler_form.json

First the embedded teacher learns the tasks, in four wordings each, at 64 to 1,024 tokens. Then its heads are scored on
dictionaries and on the tasks, and students are made that keep its first six heads, six random ones, or whole layers.
They read three of the wordings, next to the embedded corpus; they are asked in the fourth. About three hours of one core.

The tasks (arXiv 2404.06654), in the teacher's 1,900 words: one needle among needles with keys of two words
(``niah_multikey_2``), with keys and values of four numbers (``niah_multikey_3``), variables that are assigned to one
another over four hops (``vt``), the ten common words of a list (``cwe``), the three most frequent of many (``fwe``).
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Iterator

import torch
from provenance import ROOT
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

sys.path.insert(0, str(ROOT / "recipes"))
import tiny_world

from hybrid_distill.assets.dictionaries import NOUNS
from hybrid_distill.evaluation.evaluate import evaluate  # noqa: F401
from hybrid_distill.teacher import eval_mode

RESULTS = ROOT / "benchmarks" / "results" / "ruler_form.json"
LENGTHS = (256, 512, 1024)
TASKS = ("niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe")
ASKED = 0
"""The wording that only the teacher has read; students read the others."""
NEEDLES = (
    ("The magic number of {key} is {value}.", "What is the magic number of {key}? It is", " {value}."),
    ("{key} = {value}", "get {key} ->", " {value}"),
    ("Locker {key} opens with {value}.", "To open locker {key}, enter", " {value}."),
    ("- {key}: {value}", "Look up {key}:", " {value}"),
)
CHAINS = (
    ("VAR {name} = {value}", "Variables with the value {value}:", "{names}"),
    ("let {name} be {value}", "These hold {value}:", "{names}"),
    ("{name} takes {value}", "Names of {value} in order:", "{names}"),
    ("{name} <- {value}", "print names where {value}:", "{names}"),
)
COMMON = (
    ("The ten most common words of the list are:", ", "),
    ("Words that were there often:", " "),
    ("Repeated words:", " - "),
    ("ten words again and again:", "; "),
)
FREQUENT = (
    ("The three most frequent words are:", " ... "),
    ("Most frequent, three words:", " "),
    ("top three:", " . "),
    ("Three that lead:", " , "),
)


def _code(rng: random.Random, n: int) -> str:
    return "-".join(str(rng.randrange(100)) for _ in range(n))


class Documents:
    """Documents of the tasks: a context of up to so many tokens, and questions with their answers."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def tokens(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def write(
        self, task: str, length: int, wording: int, rng: random.Random, n_questions: int = 1
    ) -> tuple[str, list[tuple[str, str]]]:
        """Return a context, and questions with answers; all of them together take at most ``length`` tokens."""
        return getattr(self, f"_{task.partition('_multikey')[0]}")(task, length, wording, rng, n_questions)

    def _niah(
        self, task: str, length: int, wording: int, rng: random.Random, n_questions: int
    ) -> tuple[str, list[tuple[str, str]]]:
        line, question, answer = NEEDLES[wording]
        is_code = task.endswith("3")
        pairs, lines, room = [], [], length - 1 - n_questions * (30 if is_code else 24)
        while True:
            key = _code(rng, 4) if is_code else " ".join(rng.sample(NOUNS, 2))
            pair = {"key": key, "value": _code(rng, 4 if is_code else 2)}
            lines.append(line.format(**pair) + "\n")
            room -= len(self.tokens(lines[-1]))
            if room < 0 and len(pairs) > 1:
                break
            pairs.append(pair)
        asked = rng.choices(pairs, k=n_questions)
        return "".join(lines[: len(pairs)]), [(question.format(**pair), answer.format(**pair)) for pair in asked]

    def _vt(
        self, task: str, length: int, wording: int, rng: random.Random, n_questions: int
    ) -> tuple[str, list[tuple[str, str]]]:
        line, question, answer = CHAINS[wording]
        names, value = rng.sample(NOUNS, 5), _code(rng, 2)
        chain = [line.format(name=name, value=before) for name, before in zip(names, [value, *names])]
        room, filler = length - 1 - 24 - sum(len(self.tokens(one + "\n")) for one in chain), list[str]()
        sentences = _sentences(rng)
        while (room := room - len(self.tokens((sentence := next(sentences)) + "\n"))) >= 0:
            filler.append(sentence)
        places = sorted(rng.choices(range(len(filler) + 1), k=len(chain)))
        for place, one in reversed(list(zip(places, chain))):
            filler.insert(place, one)
        said = "".join(f" {name}" for name in names)
        return "".join(f"{one}\n" for one in filler), [(question.format(value=value), answer.format(names=said))]

    def _cwe(
        self, task: str, length: int, wording: int, rng: random.Random, n_questions: int
    ) -> tuple[str, list[tuple[str, str]]]:
        question, between = COMMON[wording]
        n = (length - 1 - 24) // (1 + len(self.tokens(between.rstrip() or "")))
        words = rng.sample(NOUNS, len(NOUNS))
        common, rest = words[:10], words[10:]
        listed = common * max(2, n // 20)
        listed += rest[: n - len(listed)]
        rng.shuffle(listed)
        found = [word for word in dict.fromkeys(listed) if word in common]
        return between.join(listed) + "\n", [(question, "".join(f" {word}" for word in found))]

    def _fwe(
        self, task: str, length: int, wording: int, rng: random.Random, n_questions: int
    ) -> tuple[str, list[tuple[str, str]]]:
        question, between = FREQUENT[wording]
        n = (length - 1 - 16) // (1 + len(self.tokens(between.rstrip() or "")))
        words = rng.sample(NOUNS, 40)
        while True:
            listed = rng.choices(words, weights=[1 / rank**2 for rank in range(1, 41)], k=n)
            counts = Counter(listed).most_common(4)
            if len({count for _, count in counts}) == len(counts) == 4:
                break
        return between.join(listed) + "\n", [(question, "".join(f" {word}" for word, _ in counts[:3]))]

    def row(
        self, task: str, length: int, wording: int, rng: random.Random, n_questions: int = 4
    ) -> tuple[list[int], list[bool]]:
        """Return a document's tokens, and which of them belong to an answer."""
        context, asked = self.write(task, length, wording, rng, n_questions)
        ids, is_answer = [self.tokenizer.bos_token_id], [False]
        for text, answers in ((context, False), *((part, i == 1) for pair in asked for i, part in enumerate(pair))):
            new = self.tokens(text) + ([self.tokens("\n")[0]] if answers else [])
            ids += new
            is_answer += [answers] * len(new)
        return ids, is_answer


def _sentences(rng: random.Random) -> Iterator[str]:
    while True:
        yield from (one + "." for one in tiny_world.story(rng).rstrip(".").split(". "))


def batch(
    documents: Documents, task: str, length: int, n: int, rng: random.Random, wordings: range
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [documents.row(task, length, rng.choice(wordings), rng) for _ in range(n)]
    ids = pad_sequence([torch.tensor(ids) for ids, _ in rows], batch_first=True)
    return ids, pad_sequence([torch.tensor(mask) for _, mask in rows], batch_first=True)


@torch.no_grad()
def answered(
    model: PreTrainedModel, documents: Documents, task: str, length: int, n: int, seed: str = "asked"
) -> float:
    """Return the share of the answers' strings that the model writes, greedily (RULER's string_match_all)."""
    right = 0.0
    for index in range(n):
        rng = random.Random(f"{seed} {task} {length} {index}")
        context, [(question, answer)] = documents.write(task, length, ASKED, rng)
        prompt = torch.tensor(
            [[documents.tokenizer.bos_token_id, *documents.tokens(context), *documents.tokens(question)]]
        )
        wanted = documents.tokens(answer)
        with eval_mode(model):
            out = model.generate(
                prompt, max_new_tokens=len(wanted), min_new_tokens=len(wanted), do_sample=False, pad_token_id=0
            )
        said = documents.tokenizer.decode(out[0, prompt.shape[1] :]).strip(" .")
        parts = answer.strip(" .").split(" ") if task in ("vt", "cwe", "fwe") else [answer.strip(" .")]
        words = said.split(" ") if len(parts) > 1 else [said]
        right += sum(part in words for part in parts) / len(parts)
    return right / n
