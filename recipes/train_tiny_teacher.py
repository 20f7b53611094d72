"""Build the embedded assets from a seed: corpus, tokenizer, knowledge questions and the tiny teacher.

python recipes/train_tiny_teacher.py --out hybrid_distill/assets

Time: about an hour on two cores. The result ships with the package, so nobody needs to run this.
Expected result: a teacher that answers 98 % of dictionaries of 8 pairs and 97 % of the questions on facts
(docs/results_tiny.md); another CPU rounds differently and gets another teacher.

KV retrieval does not emerge by itself at this size, so a curriculum teaches copying, then dictionaries that double in
size whenever they are answered. Then heads are removed one by one until a few do the retrieval, as in large models.
Then all heads learn the whole corpus, while half of the dictionaries must be answered without the removed heads.
Otherwise retrieval would spread again, and ablating single heads cannot find heads that stand in for one another.
"""

from __future__ import annotations

import gzip
import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny_world
import torch
import tyro
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from hybrid_distill.assets.dictionaries import NOUNS, QUESTION, probe_document
from hybrid_distill.plan import HeadId, HeadPlan
from hybrid_distill.teacher import ablate_heads

FORMS = [
    ("{key}{value}", "{key}"),
    ("{key}:{value}", "{key}"),
    ("{key}{value}", "{key}:"),
    ("{key}:{value}", "{key}:"),
    ("{key}:{value}", "'{key}' is "),
    ("{key}:{value}", QUESTION + " "),
]
"""Dictionary line and question: each form differs from an earlier one in one distance that a head must bridge."""
Log = Callable[..., None]


@dataclass(frozen=True)
class TeacherRun:
    """Shape of the tiny teacher and length of its training."""

    out: Path = Path("hybrid_distill/assets")
    seed: int = 0
    vocab_size: int = 2048
    width: int = 128
    mlp_width: int = 256
    n_layers: int = 6
    n_heads: int = 8
    n_kv_heads: int = 4
    corpus_documents: int = 9000
    held_out_documents: int = 300
    batch_size: int = 48
    text_length: int = 256
    max_copy_steps: int = 1500
    max_curriculum_steps: int = 6000
    mixture_steps: int = 900
    steps_per_head: int = 40
    max_steps_per_head: int = 120
    fact_steps: int = 600
    polish_steps: int = 150
    muon_lr: float = 0.02
    adamw_lr: float = 3e-3
    isolation_steps: int = 400
    retrieval_heads: int = 3
    """Heads above layer 0 that keep what the dictionaries taught; the others start over, with the text.
    Large models do retrieval in a few of many heads; without this, a small one spreads it over all of them."""
    circuit: int = 6
    """Heads that must do retrieval alone in the end, including those of layer 0."""
    threads: int = 2


def make_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE that never splits a number and keeps a word's leading space with it, as Llama 3 does."""
    tokenizer = Tokenizer(models.BPE())
    pieces = Regex(r" ?\p{L}+|\p{N}+|[^\S\n]|\n|[^\s\p{L}\p{N}]")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pieces, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<pad>", "<bos>", "<eos>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        model_max_length=1024,
    )


def make_model(run: TeacherRun, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    special: dict[str, Any] = {
        name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")
    }
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=run.width,
        intermediate_size=run.mlp_width,
        num_hidden_layers=run.n_layers,
        num_attention_heads=run.n_heads,
        num_key_value_heads=run.n_kv_heads,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        **special,
    )
    return LlamaForCausalLM(config)


class Batches:
    """Seeded batches of the three kinds of training rows: copying, dictionaries, text."""

    def __init__(
        self, run: TeacherRun, tokenizer: PreTrainedTokenizerBase, helpers: Sequence[HeadId] = ()
    ) -> None:
        self.run = run
        self.tokenizer = tokenizer
        self.helpers = helpers
        """Heads that retrieval must not depend on."""
        self.rng = random.Random(f"teacher batches {run.seed}")
        self._text = self._rows(tiny_world.corpus_document)
        self._facts = self._rows(tiny_world.fact_document)
        words = [*NOUNS, *map(str, range(100))]
        self.words = torch.tensor(tokenizer.convert_tokens_to_ids(words))
        self.numbers = self.words[len(NOUNS) :]

    def copying(self, length: int = 96, longest: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
        """Return rows of repeating random words: after the first period, every answer is already in the row.

        Periods differ between rows, so that only content, not distance, shows where the answer is.
        """
        generator = torch.Generator().manual_seed(self.rng.getrandbits(48))
        n_rows = self.run.batch_size
        words = self.words[torch.randint(len(self.words), (n_rows, longest), generator=generator)]
        period = torch.randint(8, longest + 1, (n_rows, 1), generator=generator)
        place = torch.arange(length).expand(n_rows, length)
        return words.gather(1, place % period), place > period

    def dictionaries(
        self,
        n_pairs: int,
        form: tuple[str, str] = FORMS[-1],
        n_questions: int = 8,
        n_rows: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return dictionaries with questions, and a mask of the answers: the numbers after the dictionary's own."""
        n_rows = n_rows or self.run.batch_size
        texts = [probe_document(self.rng, n_pairs, n_questions, *form) for _ in range(n_rows)]
        ids = self.tokenizer(texts, padding=True, return_tensors="pt").input_ids
        is_number = torch.isin(ids, self.numbers)
        return ids, is_number & (is_number.cumsum(1) > n_pairs)

    def _rows(self, write: Callable[[random.Random], str]) -> Iterator[list[int]]:
        """Yield rows of fixed length, packed from consecutive documents."""
        buffer: list[int] = []
        while True:
            documents = [write(self.rng) for _ in range(256)]
            for ids in self.tokenizer(documents).input_ids:
                buffer += [*ids, self.tokenizer.eos_token_id]
            while len(buffer) >= self.run.text_length:
                yield buffer[: self.run.text_length]
                buffer = buffer[self.run.text_length :]

    def text(self) -> torch.Tensor:
        return torch.tensor([next(self._text) for _ in range(self.run.batch_size // 2)])

    def facts(self) -> torch.Tensor:
        return torch.tensor([next(self._facts) for _ in range(self.run.batch_size // 2)])


def next_token_losses(
    model: LlamaForCausalLM, ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss_BL, hit_BL) of predicting tokens 1..L-1; the caller masks padding."""
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    labels = ids[:, 1:]
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), reduction="none"
    )
    return loss.view_as(labels), logits.argmax(-1) == labels


def retrieval_loss(
    model: LlamaForCausalLM, ids: torch.Tensor, answers: torch.Tensor, others: float = 0.3
) -> tuple[torch.Tensor, float]:
    """Return the loss on the answers, plus ``others`` times that on all tokens, and the accuracy of the answers."""
    loss_BL, hit_BL = next_token_losses(model, ids)
    is_answer_BL = answers[:, 1:]
    is_token_BL = ids[:, 1:] != model.config.pad_token_id
    accuracy = hit_BL[is_answer_BL].float().mean().item()
    loss = loss_BL[is_answer_BL].mean() + others * loss_BL[is_token_BL].mean()
    return loss, accuracy


class Trainer:
    """Muon on the matrices of the layers, AdamW on everything else."""

    def __init__(self, run: TeacherRun, model: LlamaForCausalLM) -> None:
        self.run = run
        self.model = model
        matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
        # By identity: == compares the elements of tensors.
        matrix_ids = {id(p) for p in matrices}
        others = [p for p in model.parameters() if id(p) not in matrix_ids]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=run.muon_lr, weight_decay=0.01, momentum=0.95),
            torch.optim.AdamW(others, lr=run.adamw_lr, betas=(0.9, 0.95), weight_decay=0.01),
        ]
        self.steps = 0
        self.masks: dict[torch.nn.Parameter, torch.Tensor] = {}
        """Masks of output projections, 0 at the columns of closed heads."""

    @torch.no_grad()
    def close_head(self, head: HeadId) -> None:
        """Disconnect a head: set its output columns to zero, and keep them zero while this trainer runs."""
        head_dim = self.run.width // self.run.n_heads
        weight = output_projection(self.model, head.layer)
        mask = self.masks.setdefault(weight, torch.ones_like(weight))
        first = head.head * head_dim
        mask[:, first : first + head_dim] = 0
        weight *= mask

    def scale_lr(self, factor: float) -> None:
        for optimizer, base in zip(
            self.optimizers, (self.run.muon_lr, self.run.adamw_lr), strict=True
        ):
            for group in optimizer.param_groups:
                group["lr"] = base * factor

    def step(self, loss: torch.Tensor) -> None:
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for weight, mask in self.masks.items():
                weight *= mask
        self.steps += 1


def learn(run: TeacherRun, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase) -> None:
    started = time.time()

    def log(phase: str, step: int, **figures: float) -> None:
        shown = "  ".join(f"{name} {value:.3f}" for name, value in figures.items())
        print(f"{time.time() - started:6.0f}s  step {step:5d}  {phase}: {shown}", flush=True)

    batches = Batches(run, tokenizer)
    for phase in (curriculum, concentrate, mixture, learn_by_heart, isolate, polish):
        learned = run.out / f"after_{phase.__name__}.pt"
        batches = Batches(run, tokenizer, batches.helpers)
        if learned.exists():
            model.load_state_dict(torch.load(learned))
        else:
            phase(run, model, batches, Trainer(run, model), log)
            torch.save(model.state_dict(), learned)
        if phase is concentrate:
            batches.helpers = closed_heads(model)
        if phase is learn_by_heart:
            # New batches: the choice must be the same whether this phase has just run or was loaded from its file.
            batches.helpers = all_but_most_missed(model, Batches(run, tokenizer))
            print("helpers of retrieval:", ", ".join(map(str, batches.helpers)), flush=True)


def curriculum(
    run: TeacherRun, model: LlamaForCausalLM, batches: Batches, trainer: Trainer, log: Log
) -> None:
    """Train copying until it works, then dictionaries that double in size whenever they are answered."""
    for step in range(run.max_copy_steps):
        loss, accuracy = retrieval_loss(model, *batches.copying())
        trainer.step(loss)
        if step % 50 == 0:
            log("copying", step, accuracy=accuracy)
        if accuracy > 0.9:
            break

    n_pairs = 4
    # Running accuracies, by form.
    recent = [0.0] * len(FORMS)
    for step in range(run.max_curriculum_steps):
        if step % 8 == 7:
            loss, _ = retrieval_loss(model, *batches.copying())
        elif step % 8 == 3:
            loss = next_token_losses(model, batches.text())[0].mean()
        else:
            form = batches.rng.randrange(len(FORMS))
            loss, accuracy = retrieval_loss(model, *batches.dictionaries(n_pairs, FORMS[form]))
            recent[form] = 0.7 * recent[form] + 0.3 * accuracy
        trainer.step(loss)
        if step % 50 == 0:
            by_form = {f"form{number}": accuracy for number, accuracy in enumerate(recent)}
            log("dictionaries", step, pairs=n_pairs, **by_form)
        if min(recent) > 0.95:
            log("answered", step, pairs=n_pairs, accuracy=min(recent))
            if n_pairs >= 32:
                break
            n_pairs *= 2
            recent = [0.0] * len(FORMS)


def retrieve_alone(
    model: LlamaForCausalLM, batches: Batches, ids: torch.Tensor, answers: torch.Tensor
) -> tuple[torch.Tensor, float]:
    """Compute `retrieval_loss`, half of the time without the helper heads, to keep it from depending on them."""
    absent = batches.helpers if batches.rng.random() < 0.5 else ()
    with ablate_heads(model, absent):
        return retrieval_loss(model, ids, answers)


@torch.no_grad()
def least_missed_first(
    model: LlamaForCausalLM, heads: Sequence[HeadId], ids: torch.Tensor, answers: torch.Tensor
) -> list[HeadId]:
    """Sort heads by the loss on the answers without each of them, lowest first."""

    def loss_without(head: HeadId) -> float:
        with ablate_heads(model, [head]):
            loss, _ = retrieval_loss(model, ids, answers, others=0.0)
        return loss.item()

    return sorted(heads, key=loss_without)


def concentrate(
    run: TeacherRun, model: LlamaForCausalLM, batches: Batches, trainer: Trainer, log: Log
) -> None:
    """Remove heads one by one, always the least missed one, and let the others take over its work."""
    heads = [head for head in HeadPlan.all(model).kept if head.layer > 0]

    def heal(accuracy: float, wanted: float, max_steps: int) -> float:
        """Train until dictionaries are answered again, or for ``max_steps``; return the running accuracy."""
        step = 0
        while True:
            is_healed = accuracy >= wanted or step >= max_steps
            if is_healed and step % run.steps_per_head == 0:
                return accuracy
            loss, now = retrieval_loss(model, *batches.dictionaries(24, n_rows=16))
            trainer.step(loss)
            step += 1
            accuracy += 0.2 * (now - accuracy)

    while len(heads) > run.retrieval_heads:
        sample = batches.dictionaries(16, n_rows=12)
        least = least_missed_first(model, heads, *sample)[0]
        heads.remove(least)
        trainer.close_head(least)
        _, accuracy = retrieval_loss(model, *sample)
        log(f"without {least}", trainer.steps, accuracy=accuracy)
        heal(accuracy, 0.95, run.max_steps_per_head)
    log("healed", trainer.steps, accuracy=heal(0.0, 0.995, 4 * run.max_steps_per_head))
    print("retrieval heads:", ", ".join(map(str, heads)), flush=True)


def closed_heads(model: LlamaForCausalLM) -> list[HeadId]:
    """List the heads that `concentrate` disconnected."""
    head_dim = model.config.hidden_size // model.config.num_attention_heads
    closed = []
    for head in HeadPlan.all(model).kept:
        weight = output_projection(model, head.layer)
        first = head.head * head_dim
        if not weight[:, first : first + head_dim].any():
            closed.append(head)
    return closed


def output_projection(model: LlamaForCausalLM, layer: int) -> torch.nn.Parameter:
    """Return the weight of a layer's output projection, [width, heads * head_dim]."""
    attention: Any = model.model.layers[layer]
    return attention.self_attn.o_proj.weight


def mixture(
    run: TeacherRun, model: LlamaForCausalLM, batches: Batches, trainer: Trainer, log: Log
) -> None:
    """Train all heads again, on the whole corpus and on dictionaries of every size."""
    recent = 0.0
    for step in range(run.mixture_steps):
        trainer.scale_lr(min(1.0, 1.5 * (1 - step / run.mixture_steps)))
        n_pairs = batches.rng.randint(4, 48)
        n_questions = batches.rng.randint(1, 6)
        ids, answers = batches.dictionaries(
            n_pairs, n_questions=n_questions, n_rows=run.batch_size // 3
        )
        loss, accuracy = retrieve_alone(model, batches, ids, answers)
        text_loss = next_token_losses(model, batches.text())[0].mean()
        trainer.step(0.5 * loss + text_loss)
        recent = 0.95 * recent + 0.05 * accuracy
        if step % 50 == 0:
            log("mixture", step, accuracy=recent, text=text_loss.item())


def learn_by_heart(
    run: TeacherRun, model: LlamaForCausalLM, batches: Batches, trainer: Trainer, log: Log
) -> None:
    """Train mostly on facts, until they are known, along with retrieval and plain text."""
    for step in range(run.fact_steps):
        trainer.scale_lr(1 - step / run.fact_steps)
        is_text = step % 4 == 0
        rows = batches.text() if is_text else batches.facts()
        text_loss = next_token_losses(model, rows)[0].mean()
        n_pairs = batches.rng.randint(4, 48)
        ids, answers = batches.dictionaries(n_pairs, n_questions=2, n_rows=8)
        loss, accuracy = retrieve_alone(model, batches, ids, answers)
        trainer.step(0.3 * loss + text_loss)
        # Steps of both kinds: one in 20 is a text, the one after it facts.
        if step % 20 < 2:
            log("text" if is_text else "facts", step, accuracy=accuracy, loss=text_loss.item())


def all_but_most_missed(model: LlamaForCausalLM, batches: Batches) -> list[HeadId]:
    """List the heads that may help with retrieval but must not be needed."""
    ranked = least_missed_first(model, HeadPlan.all(model).kept, *batches.dictionaries(16))
    return sorted(ranked[: -batches.run.circuit])


def isolate(
    run: TeacherRun, model: LlamaForCausalLM, batches: Batches, trainer: Trainer, log: Log
) -> None:
    """Teach the few heads to retrieve with or without the others, which now include heads of layer 0."""
    for step in range(run.isolation_steps):
        trainer.scale_lr(0.6 * (1 - step / run.isolation_steps))
        train_on_everything(model, batches, trainer, log, step)


def train_on_everything(
    model: LlamaForCausalLM, batches: Batches, trainer: Trainer, log: Log, step: int
) -> None:
    """Train one step on facts, plain text and dictionaries."""
    rows = torch.cat([batches.facts()[:16], batches.text()[:8]])
    text_loss = next_token_losses(model, rows)[0].mean()
    n_pairs = batches.rng.randint(4, 48)
    ids, answers = batches.dictionaries(n_pairs, n_questions=4, n_rows=16)
    loss, accuracy = retrieve_alone(model, batches, ids, answers)
    trainer.step(0.5 * loss + text_loss)
    if step % 20 < 2:
        log("together", step, accuracy=accuracy, loss=text_loss.item())


def polish(
    run: TeacherRun, model: LlamaForCausalLM, batches: Batches, trainer: Trainer, log: Log
) -> None:
    """Train on everything once more, with a learning rate that decays to zero."""
    for step in range(run.polish_steps):
        trainer.scale_lr(0.25 * (1 - step / run.polish_steps))
        train_on_everything(model, batches, trainer, log, step)


def write_corpus(run: TeacherRun) -> None:
    for split, n in (("train", run.corpus_documents), ("held_out", run.held_out_documents)):
        documents = tiny_world.write_documents(n, f"corpus {split} {run.seed}")
        text = "".join(json.dumps({"text": document}) + "\n" for document in documents)
        # Without a time: the same corpus gives the same bytes.
        compressed = gzip.compress(text.encode(), mtime=0)
        (run.out / f"corpus_{split}.jsonl.gz").write_bytes(compressed)
    questions = tiny_world.knowledge_questions()
    lines = "".join(json.dumps(question) + "\n" for question in questions)
    (run.out / "knowledge.jsonl").write_text(lines)


def write_teacher(
    folder: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write a Hugging Face folder in half precision that every supported version of transformers reads alike."""
    torch.nn.Module.to(model, torch.float16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    changes_by_file: dict[str, dict[str, Any]] = {
        "config.json": {"rope_theta": 10000.0, "torch_dtype": "float16"},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
    }
    for name, changes in changes_by_file.items():
        path = folder / name
        record = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps(record, indent=2) + "\n")


def main(run: TeacherRun) -> None:
    torch.manual_seed(run.seed)
    torch.set_num_threads(run.threads)
    run.out.mkdir(parents=True, exist_ok=True)
    write_corpus(run)
    rng = random.Random(run.seed)
    sample = tiny_world.write_documents(4000, f"tokenizer {run.seed}")
    sample += [probe_document(rng, 32, 4) for _ in range(1000)]
    sample += [f"{noun} {noun}\n{noun}\n" * 30 for noun in NOUNS]
    tokenizer = make_tokenizer(sample, run.vocab_size)
    model = make_model(run, tokenizer)
    n_parameters = sum(p.numel() for p in model.parameters())
    print(f"{n_parameters:,} parameters, vocabulary {len(tokenizer)}", flush=True)
    learn(run, model, tokenizer)
    write_teacher(run.out / "tiny_teacher", model, tokenizer)


if __name__ == "__main__":
    main(tyro.cli(TeacherRun, description=__doc__))
