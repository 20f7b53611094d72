"""Small tokenizers that treat digits, blanks and newlines as those of the large families do."""

from planted import KEYS
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from hybrid_distill.probes.kv_retrieval import KVRetrieval

# The families' own patterns, shortened: what shares a piece with a blank, newline or other digits.
LLAMA3 = r" ?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = LLAMA3.replace("{1,3}", "")
BOS = "<s>"
TURN = "<|turn|>"
END = "<|end|>"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "<|turn|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
QWEN3 = """
{%- set last = namespace(question=-1) %}
{%- for m in messages %}
{%- if m.role == 'user' %}{% set last.question = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
{%- set thought = m.content.split('</think>')[0].split('<think>')[-1] if '</think>' in m.content %}
{%- set answer = m.content.split('</think>')[-1] %}
{{- '<' + m.role + '> ' }}
{%- if m.role == 'assistant' and loop.index0 > last.question and (loop.last or thought) %}
{{- '<think> ' + thought|trim + ' </think> ' }}
{%- endif %}
{{- answer|trim + ' <end> ' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<assistant> ' }}
{%- if enable_thinking is false %}{{ '<think>  </think> ' }}{% endif %}
{%- endif %}"""
"""Template of a model that may think, as Qwen3's: drops the thoughts of earlier turns, writes an empty one for none."""
STYLES = ("llama3", "qwen", "smollm2", "gemma", "glued")


def family_tokenizer(style: str, template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """Train a small BPE tokenizer that splits as its family does.

    "glued" takes blanks and newlines into the tokens of numbers.
    """
    if style == "gemma":
        tokenizer = Tokenizer(models.BPE(byte_fallback=True))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d|\n+|▁?[^▁\d\n]+"), "isolated")
        tokenizer.decoder = decoders.Replace("▁", " ")
        alphabet = [*map(chr, range(33, 127)), "▁", "\n"]
    else:
        pattern = {"llama3": LLAMA3, "qwen": QWEN, "glued": r"\s?\S+|\s+"}.get(style)
        split = (
            pre_tokenizers.Split(Regex(pattern), "isolated")
            if pattern
            else pre_tokenizers.Digits(True)
        )
        tokenizer = Tokenizer(models.BPE())
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=style == "smollm2")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, last])
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [f"{e.prompt}{e.answer}\n" for e in KVRetrieval(32, keys=KEYS).examples(40)]
    texts += [f" {value}\n {value}\n" for value in range(100)] * 5
    options = {"vocab_size": 900, "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(special_tokens=[BOS, TURN, END], **options)
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=END)
    fast.chat_template = template
    return fast
