"""The teacher's own text: prompts of many kinds, the same bytes after any stop, its logits."""

import itertools
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import QWEN3, family_tokenizer
from messages import has_facts, naming
from test_post import CLOSES_THE_LAST
from tokenizers.processors import TemplateProcessing
from training import die, killed, small_models, spaced_tokenizer, word_tokenizer

from hybrid_distill.assets import prompts_path
from hybrid_distill.assets.dictionaries import HEADER, QUESTION
from hybrid_distill.chat_template import render
from hybrid_distill.cli.app import main
from hybrid_distill.cli.generate_data import GenerateJob, generate
from hybrid_distill.data import (
    CachedLogitsDataset,
    DataConfig,
    LogitHeader,
    PackedRows,
    TokenHeader,
    Tokens,
    open_logits,
    open_rows,
    write_logits,
)
from hybrid_distill.data import generate as writing
from hybrid_distill.data.caching import top_k_of
from hybrid_distill.data.generate import Sampling, prompt
from hybrid_distill.data.tokens import Shard
from hybrid_distill.probes.kv_retrieval import DIALOGUE, REWORDED
from hybrid_distill.teacher import fingerprint, load_teacher

CHAT = """
{%- for m in messages %}
{{- m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' else ' ' }}
{%- endfor -%}
{%- if add_generation_prompt %}assistant: {% endif -%}
"""


@pytest.fixture
def job(tmp_path: Path) -> GenerateJob:
    sampling = Sampling(seed=3, new_tokens=12, batch_size=4)
    return GenerateJob("tiny", "1.2K", tmp_path / "self", sampling=sampling, shard_tokens=200)


@pytest.fixture
def chat_job(job: GenerateJob, tmp_path: Path) -> GenerateJob:
    return with_template(CHAT, job, tmp_path / "instruct")


def with_template(template: str, job: GenerateJob, folder: Path) -> GenerateJob:
    """Return a job with the embedded teacher as an instruct model of this chat template."""
    model, tokenizer = load_teacher("tiny")
    tokenizer.chat_template = template
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return replace(job, model=str(folder), tokens="1K")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.bin")}


@pytest.mark.parametrize(("chat", "turns"), [(True, {1, 2, 3}), (False, {1})])
def test_prompts_are_of_many_kinds_and_follow_from_the_seed(chat: bool, turns: set[int]) -> None:
    def prompts_of(seed: int) -> list[tuple[str, ...]]:
        return [prompt(seed, number, chat) for number in range(600)]

    prompts = prompts_of(seed=0)
    assert prompts_of(seed=0) == prompts
    assert prompts_of(seed=1)[:50] != prompts[:50]
    assert len(set(prompts)) > 480
    assert {len(messages) for messages in prompts} == turns
    unfilled_slot = re.compile(r"\{.*\}", re.DOTALL)
    for messages in prompts:
        assert not unfilled_slot.search(" ".join(messages))


def test_a_number_that_a_text_has_twice() -> None:
    """Number 16,525 of seed 0 draws the same number for two slots."""
    (text,) = prompt(0, 16_525, chat=True)
    assert "{" not in text


def test_no_prompt_uses_the_wording_of_a_probe() -> None:
    templates = [HEADER, QUESTION, REWORDED.header, REWORDED.question, *DIALOGUE[1:]]
    wordings = ["dictionary", "the key", "value of"]
    for template in templates:
        wordings.append(template.split("{")[0].strip(" '").lower())
    text = prompts_path().read_text()
    for seed, number, chat in itertools.product(range(3), range(300), (True, False)):
        text += "\n".join(prompt(seed, number, chat))
    text = text.lower()
    for words in wordings:
        assert words not in text


def test_a_killed_command_resumes_to_the_bytes_of_one_go(job: GenerateJob, tmp_path: Path) -> None:
    line = generate(job)
    header = TokenHeader.load(job.out / "tokens.json")
    assert has_facts(line, f"{header.tokens:,}", f"{header.documents:,}")
    assert 900 < header.tokens <= 1200
    stopped = replace(job, out=tmp_path / "stopped")
    whole_batch = writing._documents
    lives = iter(range(2))

    def dying(*args: Any) -> list[str]:
        if next(lives, None) is None:
            die()
        return whole_batch(*args)

    def work() -> None:
        pytest.MonkeyPatch().setattr(writing, "_documents", dying)
        generate(stopped)

    killed(work)
    assert TokenHeader.file(stopped.out, partial=True).exists()

    generate(stopped)
    assert contents(stopped.out) == contents(job.out)

    # A finished folder is left alone, and reports what it reported, up to the time.
    second_line = generate(job)
    assert second_line.split(",")[0] == line.split(",")[0]


@pytest.mark.parametrize(
    ("option", "other"),
    [("seed", 4), ("new_tokens", 13), ("temperature", 1.0), ("top_p", 0.5), ("batch_size", 5)],
)
def test_other_settings_are_refused_by_name(job: GenerateJob, option: str, other: Any) -> None:
    short_job = replace(job, tokens="300")
    generate(short_job)
    changed = replace(job.sampling, **{option: other})
    with pytest.raises(ValueError, match=naming(job.out, option, other)):
        generate(replace(short_job, sampling=changed))


def test_a_command_killed_between_its_two_headers_leaves_one(job: GenerateJob) -> None:
    """The finished header is written before the one of an unfinished folder is deleted."""
    short_job = replace(job, tokens="300", top_k_logits=2, seq_len=32)
    generate(short_job)
    folders = {TokenHeader: job.out, LogitHeader: job.out / "logits"}
    for kind, folder in folders.items():
        finished = kind.file(folder)
        shutil.copy(finished, kind.file(folder, partial=True))
    before = contents(job.out)

    generate(short_job)

    assert contents(job.out) == before
    for kind, folder in folders.items():
        assert kind.file(folder).is_file()
        assert not kind.file(folder, partial=True).exists()


@torch.no_grad()
def test_conversations_have_the_loss_on_the_answers_and_the_logits_of_their_rows(
    chat_job: GenerateJob,
) -> None:
    seq_len = 32
    top_k = 5

    generate(replace(chat_job, top_k_logits=top_k, seq_len=seq_len))

    model, tokenizer = load_teacher(chat_job.model)
    config = DataConfig(sources=(str(chat_job.out),), chat=True, seq_len=seq_len)
    rows = open_rows(config, tokenizer)
    logits = open_logits(chat_job.out / "logits")
    logits.check_settings(tokenizer, vocab_size=len(tokenizer), seq_len=seq_len, temperature=1.0)
    logits.check_rows(rows, fingerprint(model), rows_read=10**6)

    ids = np.fromfile(chat_job.out / "ids-00000.bin", "<u2")
    learned = np.fromfile(chat_job.out / "learned-00000.bin", bool)
    starts = np.fromfile(chat_job.out / "starts-00000.bin", "<i8")
    text = tokenizer.decode(ids[: starts[1]])
    assert text.startswith("user:")
    assert "assistant:" in text
    answered_ids = ids[1:][learned[:-1]]
    assert tokenizer.decode(answered_ids[:5]).strip()
    assert learned.mean() < 0.6

    batch = CachedLogitsDataset(rows, logits).batch(0, rows.n_rows)
    mask = batch["mask"]
    top = top_k_of(model, batch, top_k, vocab_size=len(tokenizer))
    expected, _ = top.ids_BLK.sort(-1)
    assert mask.any()
    assert torch.equal(batch["teacher_ids_BLK"][mask], expected[mask])


def test_conversations_of_several_turns_by_a_template_that_drops_thoughts(
    job: GenerateJob, tmp_path: Path
) -> None:
    thinking_job = with_template(QWEN3, job, tmp_path / "thinking")

    generate(thinking_job)

    _, tokenizer = load_teacher(thinking_job.model)
    (tokens,) = open_rows(DataConfig((str(job.out),), chat=True), tokenizer).sources
    n_answers = []
    for shard in tokens.shards:
        assert shard.learned is not None
        learned_ids = shard.ids[shard.learned.nonzero()[0] + 1]
        assert "think>" not in tokenizer.decode(learned_ids)
        for document in np.split(shard.ids, shard.starts[1:]):
            n_answers.append(tokenizer.decode(document).count("<assistant>"))
    assert max(n_answers) == 3


def answering(monkeypatch: pytest.MonkeyPatch, *answers: str) -> list[list[str]]:
    """Replace the model's answers by these, in turn; return the prompts of each batch."""
    batches: list[list[str]] = []

    def answer(model: Any, tokenizer: Any, texts: list[str], *_: Any, **__: Any) -> list[str]:
        batches.append(texts)
        return list(itertools.islice(itertools.cycle(answers), len(texts)))

    monkeypatch.setattr(writing, "_continuations", answer)
    return batches


def test_an_answer_stands_in_its_conversation_as_it_was_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A cut thought stays; a closed one takes the place of the empty one that the prompt ends in."""
    tokenizer = family_tokenizer("qwen", QWEN3)
    batches = answering(monkeypatch, "<think>\nlong", "a </think> b", "c")
    prompts = [("q1", "q2"), ("q3", "q4"), ("q5",)]

    conversations = writing._conversations(None, tokenizer, Sampling(), 0, prompts)  # type: ignore[arg-type]

    said = [[message["content"] for message in messages] for messages in conversations]
    assert said == [["q1", "<think>\nlong", "q2", "<think>\nlong"], ["q5", "c"]]
    assert [len(texts) for texts in batches] == [3, 1]
    for n_messages, texts in zip((2, 4), batches, strict=True):
        text = render(conversations[0][:n_messages], tokenizer, thinking=False)
        assert text == texts[0] + "<think>\nlong <end> "


def test_a_model_without_an_answer_that_the_template_keeps_is_refused(
    job: GenerateJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = answering(monkeypatch, "a </think> b")
    with pytest.raises(ValueError, match="--form text"):
        generate(with_template(QWEN3, job, tmp_path / "thinking"))
    assert len(batches) == 4


def test_a_template_without_a_place_for_answers_is_refused_before_they_are_computed(
    job: GenerateJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = answering(monkeypatch, "a")
    with pytest.raises(ValueError, match=naming("{% generation %}")):
        generate(with_template(CLOSES_THE_LAST, job, tmp_path / "closing"))
    assert batches == []


WITHOUT_SWITCH = QWEN3.replace("enable_thinking is false", "false")
BEGINS_A_THOUGHT = QWEN3.replace("{{ '<think>  </think> ' }}", "{{ '<think> ' }}").replace(
    "(loop.last or thought)", "false"
)
"""Template whose prompts begin a thought, and whose conversations hold none, as DeepSeek-R1's."""


@pytest.mark.parametrize(
    ("template", "ending"),
    [
        (QWEN3, "<assistant> <think>  </think> "),
        (WITHOUT_SWITCH, "<assistant> <think>  </think> "),
        (BEGINS_A_THOUGHT, "<assistant> "),
        (CHAT, "assistant: "),
        (CHAT.replace("assistant: {%", "assistant:{%"), "assistant:"),
    ],
    ids=["qwen3", "without a switch", "begins a thought", "plain", "plain, space in the answer"],
)
def test_a_model_answers_behind_the_text_that_stands_in_the_conversation(
    monkeypatch: pytest.MonkeyPatch, template: str, ending: str
) -> None:
    tokenizer = family_tokenizer("qwen", template)
    batches = answering(monkeypatch, "c")
    prompts: list[tuple[str, ...]] = [("q1", "q2")]

    (messages,) = writing._conversations(None, tokenizer, Sampling(), 0, prompts)  # type: ignore[arg-type]

    assert len(messages) == 4
    for (text,), question in zip(batches, prompts[0], strict=True):
        after_question = text.split(question)[1]
        assert after_question.endswith(ending)
        assert after_question.count("assistant") == 1


def test_a_text_continues_where_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """This tokenizer closes every text; a model that reads the end begins another one."""
    model, tokenizer = load_teacher("tiny")
    eos = tokenizer.eos_token_id
    inputs = {}
    closing = TemplateProcessing(
        single=f"$A {tokenizer.eos_token}", special_tokens=[(tokenizer.eos_token, eos)]
    )
    tokenizer.backend_tokenizer.post_processor = closing

    def generated(model: Any, **options: Any) -> torch.Tensor:
        inputs.update(options)
        return options["inputs"]

    monkeypatch.setattr(writing, "generate_ids", generated)
    writing._continuations(model, tokenizer, ["The sky"], Sampling(), "0", True)
    assert tokenizer("The sky")["input_ids"][-1] == eos
    assert inputs["inputs"][0, -1] != eos


@pytest.mark.parametrize("end", ["<eos>", "<turn>"])
def test_a_continuation_begins_with_its_space_and_stops_at_any_end(
    monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """``<turn>`` ends a turn by the model's generation_config; the tokenizer has it as a word."""
    tokenizer = spaced_tokenizer()
    _, model = small_models()
    end_id = tokenizer.convert_tokens_to_ids(end)
    model.generation_config.eos_token_id = [tokenizer.convert_tokens_to_ids("<turn>"), 0]
    is_blue = tokenizer("is blue")["input_ids"]

    def generated(model: Any, **options: Any) -> torch.Tensor:
        padding = [options["generation_config"].pad_token_id] * 2
        return torch.cat([options["inputs"], torch.tensor([[*is_blue, end_id, *padding]])], dim=1)

    monkeypatch.setattr(writing, "generate_ids", generated)
    texts = writing._continuations(model, tokenizer, ["The sky"], Sampling(), "0", True)
    assert texts == [" is blue"]


def test_logits_of_rows_without_a_loss_are_written(tmp_path: Path) -> None:
    ids = np.arange(2, 66, dtype="<u2")
    nothing_learned = np.zeros(64, dtype=bool)
    shard = Shard(ids, np.array([0]), learned=nothing_learned)
    rows = PackedRows([Tokens((shard,), 1, "questions")], seq_len=16)
    _, teacher = small_models()

    write_logits(
        tmp_path,
        teacher,
        word_tokenizer(),
        rows,
        name="small",
        top_k=3,
        rows_read=rows.n_rows,
        vocab_size=99,
    )
    assert open_logits(tmp_path).header.measured == {"rows": 4, "tokens": 0}


def test_bad_input_ends_in_one_line(
    job: GenerateJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.md").touch()
    command = ["generate-data", "--model", "tiny", "--tokens", "600"]
    command += ["--out", str(tmp_path / "new")]
    mistakes = {
        "--tokens many": "'many'",
        "--form chat": "chat_template.jinja",
        "--new-tokens 2000": "512",
        f"--out {tmp_path / 'mine'}": "notes.md",
    }
    for mistake, named in mistakes.items():
        with pytest.raises(SystemExit, match="2"):
            main([*command, *mistake.split()])
        assert named in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
