"""Which decoders can be taught from: every causal-LM class of the installed transformers at tiny random weights.

    python benchmarks/families.py                     # writes benchmarks/results/families.json, the tables of docs/
    python benchmarks/families.py --only llama gemma2 # those model types again; the others stay as recorded

Each model type gets a base shape and, where its config has the switch, variants: with and without a window, tied
embeddings, biases. Each shape is one of:

- supported: every check of `CHECKS` holds;
- refused: one line of ours, before a number could be wrong;
- failed: a check does not hold, or something else than our one line was raised;
- no teacher: transformers itself cannot make it, or run it on token ids alone.

Exit status 1 while anything fails. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import re
import shutil
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from records import device_name, parser_of, read, write
from torch import Tensor
from tqdm.auto import tqdm
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    dynamic_module_utils,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

import hybrid_distill
from hybrid_distill.export import export_checkpoint
from hybrid_distill.export.check import TOLERANCE, left_padded
from hybrid_distill.export.versions import TRIED, oldest_transformers
from hybrid_distill.model import HybridForCausalLM, packed_inputs
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.teacher import head_kinds

RESULTS = Path(__file__).parent / "results" / "families.json"
PAGE = Path(__file__).parents[1] / "docs" / "families.md"
PACKAGE = Path(hybrid_distill.__file__).parent
# Of the tiny models.
VOCAB = 128
LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 16
WINDOW = 8
D_STATE = 8
WIDTH = HEADS * HEAD_DIM
LENGTHS = (5, 13, 21)  # of documents and prompts: below and above the window
LIMIT = TOLERANCE[torch.float32]
EXACT = 0.0
# What is compared, relative to the largest logit, and the largest difference that passes.
CHECKS = {
    "all heads kept = teacher": EXACT,
    "teacher packed = alone": LIMIT,
    "packed = alone": LIMIT,
    "cached = full": LIMIT,
    "left-padded = alone": LIMIT,
    "all heads kept, reloaded": EXACT,
    "reloaded": EXACT,
}

NO_TEACHER = "no teacher"
HEAD = """# Model families

Can my model be a teacher? Find its `model_type` in the table: all {n_types} that transformers {transformers} has as a
causal language model, built with tiny random weights and tested with torch {torch} on {device}.

| student | meaning |
| --- | --- |
| supported | all heads kept: the teacher's logits bit for bit; some heads kept: every check below passes |
| refused | building a student ends with an error: what was found is under "remarks" |
| failed | neither |
| no teacher | `AutoModelForCausalLM` cannot make the model or run it on token ids alone |

- **Scored by**: the heads that `score` and `analyze` find ([heads.md](heads.md)).
- **Oldest transformers for an export**: an export refuses an older version. Where no other was tried, it is this page's
  version. Tried: {tried}.

Checks are in float32, relative to the largest logit. This page is written by `python benchmarks/families.py` and
`python benchmarks/versions.py`: edit the scripts instead.
"""

# Sizes by the names that configs have for them. A config gets those of its fields, at every depth.
_NAMES: tuple[tuple[int, str], ...] = (
    (VOCAB, "vocab_size unpadded_vocab_size vocab_size_per_layer_input"),
    (WIDTH, "hidden_size d_model n_embd dim_model emb_dim embedding_size input_embedding_size "
            "output_embedding_size hidden_size_global word_embed_proj_dim lru_width adapter_in_dim adapter_out_dim "
            "adapter_input_size output_proj_dims"),
    (LAYERS, "num_hidden_layers n_layer n_layers num_layers decoder_layers encoder_layers num_encoder_layers "
             "num_decoder_layers num_blocks"),
    (HEADS, "num_attention_heads n_head n_heads num_heads decoder_attention_heads encoder_attention_heads "
            "num_encoder_attention_heads num_decoder_attention_heads swa_num_attention_heads linear_num_heads "
            "linear_num_value_heads attention_heads"),
    (KV_HEADS, "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads num_query_groups"),
    (HEAD_DIM, "head_dim dim_head kv_channels attention_head_size swa_head_dim d_head linear_key_head_dim "
               "linear_value_head_dim linear_head_dim v_head_dim swa_v_head_dim global_head_dim"),
    (96, "intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size dim_ff dff d_inner "
         "feed_forward_size intermediate_size_mlp dense_intermediate_size"),
    (32, "moe_intermediate_size shared_expert_intermediate_size shared_experts_intermediate_size "
         "shared_intermediate_size expert_ffn_hidden_size moe_shared_expert_intermediate_size image_size"),
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts num_experts_to_load"),
    (2, "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts zero_expert_num index_n_heads "
        "index_topk num_kv_shared_layers eos_token_id sep_token_id"),
    (1, "n_group topk_group num_expert_group bos_token_id decoder_start_token_id cls_token_id start_token_id"),
    (256, "max_position_embeddings n_positions n_ctx max_seq_len model_max_length context_length "
          "max_sequence_length max_target_positions"),
    (WINDOW, "sliding_window sliding_window_size attention_window_size attention_chunk_size window_size "
             "local_attention keep_window_size"),
    (8, "qk_rope_head_dim qk_nope_head_dim mamba_n_heads mamba_num_heads n_mamba_heads mamba_d_state rotary_dim "
        "patch_size"),
    (16, "kv_lora_rank o_lora_rank laurel_rank hidden_size_per_layer_input index_head_dim mamba_d_head "
         "mamba_head_dim mamba_headdim qk_head_dim query_pre_attn_scalar head_dim_v"),
    (24, "q_lora_rank"),
    (512, "encoder_hash_byte_group_vocab"),
    (128, "mamba_d_ssm"),
    (0, "pad_token_id"),
)  # fmt: skip
SIZES: dict[str, Any] = {}
for _size, _names in _NAMES:
    SIZES |= dict.fromkeys(_names.split(), _size)

# Where a field's name alone does not say what fits: model type -> fields.
_WINDOWS_BY_TURNS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
_EVERY_HEAD_ITS_KEYS = {"num_key_value_heads": HEADS}
_GEMMA_4 = {"num_kv_shared_layers": 0, "global_head_dim": HEAD_DIM,
            "layer_types": ["sliding_attention", "full_attention"] * 2}  # fmt: skip
_INDEXED = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
            "indexer_compress_ratio": 2, "hc_lowrank": 8, "split_ngram_parts": 2}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        ("axk2", "deepseek_v32", "glm_moe_dsa", "dots3_note_text"), _EVERY_HEAD_ITS_KEYS
    ),
    **dict.fromkeys(("gemma4_text", "gemma4_unified_text"), _GEMMA_4),
    "gemma4": {"text_config": _GEMMA_4},
    "gemma4_unified": {"text_config": _GEMMA_4},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}},
    },
    "dots3_note": {
        "text_config": _EVERY_HEAD_ITS_KEYS,
        "vision_config": {"mlp_layer_types": ["dense"] * LAYERS},
    },
    "dbrx": {"attn_config": {"rope_theta": 10_000.0, "clip_qkv": 8}},
    "dots1": {
        "n_shared_experts": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    # As published: positions of full layers are scaled, those of windowed ones are not.
    "gemma3_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 50_000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        },
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    **dict.fromkeys(("gemma2", "cohere2", "ministral"), _WINDOWS_BY_TURNS),
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "mamba2": {"num_heads": 8, "state_size": 8, "n_groups": 2},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "qwen4_exp_text": _INDEXED,
    "qwen4_exp": {"text_config": _INDEXED},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 32},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 8},
}

# Switches that change what is computed: variant -> the fields that a config must have one of, and their values.
VARIANTS: dict[str, dict[str, Any]] = {
    "window": {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "no window": {"sliding_window": None},
    "tied embeddings": {"tie_word_embeddings": True},
    "untied embeddings": {"tie_word_embeddings": False},
    "biases": {
        "attention_bias": True,
        "use_bias": True,
        "use_qkv_bias": True,
        "qkv_bias": True,
        "mlp_bias": True,
    },
    "wider heads in full layers": {"global_head_dim": 2 * HEAD_DIM},
    "keys shared by layers": {"num_kv_shared_layers": 2},
    "query and key norms": {"use_qk_norm": True, "qk_layernorm": True},
}


def tiny_teacher(model_type: str, variant: str = "", seed: int = 0) -> PreTrainedModel:
    """A random float32 model of a causal-LM model type in eval mode.

    Its weights are large enough for attention that is not uniform, and no vector is all zeros or ones.
    """
    config_class = CONFIG_MAPPING[model_type]
    fields = tiny_fields(config_class, SHAPES.get(model_type, {}))
    fields |= variants_of(model_type)[variant] if variant else {}
    config = config_class(**fields)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(0.2 * torch.randn_like(parameter))
                else:
                    parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
    return model.eval()


def tiny_fields(config_class: Any, chosen: dict[str, Any]) -> dict[str, Any]:
    """Arguments that make a tiny config of a class; ``chosen`` go before what field names say."""
    default = None
    # Some classes cannot be made without arguments.
    with contextlib.suppress(Exception):
        default = config_class()
    if default is None:
        return dict(chosen)
    fields = {name: size for name, size in SIZES.items() if name in default.to_dict()}
    if "qk_rope_head_dim" in fields:
        # RoPE reads it in models with latent attention.
        fields["head_dim"] = SIZES["qk_rope_head_dim"]
    for name in config_class.sub_configs:
        part = getattr(default, name, None)
        if isinstance(part, PretrainedConfig) and not isinstance(part, config_class):
            fields[name] = {
                "model_type": part.model_type,
                **tiny_fields(type(part), chosen.get(name, {})),
            }
    merged = set(fields) & set(config_class.sub_configs)
    return fields | {name: value for name, value in chosen.items() if name not in merged}


def variants_of(model_type: str) -> dict[str, dict[str, Any]]:
    """The variants whose switches this model type has, with their fields; those that change nothing are left out."""
    config_class = CONFIG_MAPPING[model_type]
    try:
        base = config_class(**tiny_fields(config_class, SHAPES.get(model_type, {}))).to_dict()
    except Exception:
        return {}
    # Some configs drop what they are made with.
    known = base | SHAPES.get(model_type, {})
    variants: dict[str, dict[str, Any]] = {}
    for name, switches in VARIANTS.items():
        fields: dict[str, Any] = {}
        for field, value in switches.items():
            if field in known and known[field] != value:
                fields[field] = value
        if fields:
            variants[name] = fields
    return variants


def keep_some(teacher: PreTrainedModel) -> HeadPlan:
    """Keep heads that share KV heads unevenly, no head, all heads but one, by turns."""
    shape = HeadPlan.all(teacher)
    every = tuple(range(shape.n_heads))
    kept = [(every[0], every[1], every[-1]), (), every[:-1]]
    pairs = []
    for layer in range(shape.n_layers):
        pairs += [(layer, head) for head in kept[layer % len(kept)]]
    return HeadPlan.from_pairs(teacher, sorted(pairs))


def make_student(teacher: PreTrainedModel, plan: HeadPlan) -> HybridForCausalLM:
    """A student whose recurrent heads use all they have: conv taps, gate, data-dependent decay, D."""
    student, _ = build_student(teacher, plan, d_state=D_STATE, init="teacher")
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(1)
        for heads in student.recurrent_heads():
            for parameter in heads.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return student


def measure(model_type: str, variant: str, scratch: Path) -> dict[str, Any]:
    """One row of the table: what became of one shape of one model type."""
    row: dict[str, Any] = {"variant": variant}
    try:
        teacher = tiny_teacher(model_type, variant)
    except Exception as error:
        return row | {"status": NO_TEACHER, "reason": _one_line(error)}
    row |= {"class": type(teacher).__name__, "scoring": _scoring(teacher)}
    try:
        logits_of(teacher, torch.arange(3, 24)[None], use_cache=False)
    except Exception as error:
        return row | {"status": NO_TEACHER, "reason": _one_line(error)}
    try:
        figures = {name: differs for name, differs in comparisons(teacher, scratch)}
    except Exception as error:
        ours = is_our_refusal(error)
        return row | {
            "status": "refused" if ours else "failed",
            "reason": str(error) if ours else _crash(error),
        }
    wrong = [name for name, limit in CHECKS.items() if not figures[name] <= limit]
    return row | {
        "status": "failed" if wrong else "supported",
        "reason": "; ".join(wrong),
        "differences": figures,
    }


def comparisons(teacher: PreTrainedModel, scratch: Path) -> Iterator[tuple[str, float]]:
    """(name of a check, difference relative to the largest logit), of all `CHECKS`."""
    generator = torch.Generator().manual_seed(2)
    documents = [torch.randint(3, VOCAB, (length,), generator=generator) for length in LENGTHS]
    ids_BL = torch.randint(3, VOCAB, (2, 24), generator=generator)
    plans = {"all": HeadPlan.all(teacher), "some": keep_some(teacher)}
    students = {name: make_student(teacher, plan) for name, plan in plans.items()}
    student = students["some"]

    taught_BLV = logits_of(teacher, ids_BL, use_cache=False)
    kept_BLV = logits_of(students["all"], ids_BL, use_cache=False)
    yield "all heads kept = teacher", difference(kept_BLV, taught_BLV)

    row_BL = torch.cat(documents)[None]
    numbers = torch.arange(len(LENGTHS))
    seq_idx_BL = numbers.repeat_interleave(torch.tensor(LENGTHS))[None]
    packed = packed_inputs(seq_idx_BL, teacher.dtype, teacher.config)
    packed_LV = logits_of(teacher, row_BL, use_cache=False, **packed)[0]
    taught_alone = [logits_of(teacher, ids_L[None], use_cache=False)[0] for ids_L in documents]
    yield "teacher packed = alone", difference(packed_LV, torch.cat(taught_alone))

    packed_LV = logits_of(student, row_BL, seq_idx=seq_idx_BL)[0]
    alone_of = [logits_of(student, ids_L[None], use_cache=False)[0] for ids_L in documents]
    yield "packed = alone", difference(packed_LV, torch.cat(alone_of))

    differences = []
    for model in students.values():
        whole_LV = logits_of(model, documents[-1][None], use_cache=False)[0]
        differences.append(difference(decoded(model, documents[-1]), whole_LV))
    yield "cached = full", max(differences)

    padded_BL, mask_BL = left_padded(documents)
    positions_BL = (mask_BL.cumsum(-1) - 1).clamp(min=0)
    batch = logits_of(
        student,
        padded_BL,
        attention_mask=mask_BL,
        position_ids=positions_BL,
        use_cache=False,
    )
    differences = []
    for row_LV, own_LV in zip(batch, alone_of, strict=True):
        differences.append(difference(row_LV[-len(own_LV) :], own_LV))
    yield "left-padded = alone", max(differences)

    checks = {"all": "all heads kept, reloaded", "some": "reloaded"}
    for name, exported in students.items():
        folder = scratch / f"{teacher.config.model_type}-{name}"
        export_checkpoint(exported, None, folder, plan=plans[name], gate=False)
        reloaded = AutoModelForCausalLM.from_pretrained(
            folder,
            trust_remote_code=True,
            dtype=torch.float32,
        )
        reloaded_BLV = logits_of(reloaded, ids_BL, use_cache=False)
        expected_BLV = logits_of(exported, ids_BL, use_cache=False)
        yield checks[name], difference(reloaded_BLV, expected_BLV)
        shutil.rmtree(folder)


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids_BL: Tensor, **options: Any) -> Tensor:
    """Logits [B, L, V]."""
    return model(input_ids=ids_BL, **options).logits


@torch.no_grad()
def decoded(student: HybridForCausalLM, ids_L: Tensor) -> Tensor:
    """Logits [L, V] of half the tokens at once, then one at a time from the cache."""
    half = len(ids_L) // 2
    cache = student.new_cache()
    pieces = [ids_L[:half], *ids_L[half:].split(1)]
    logits: list[Tensor] = []
    for piece_L in pieces:
        output = student(input_ids=piece_L[None], cache=cache)
        logits.append(output.logits[0])
    return torch.cat(logits)


def difference(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest logit; NaN if there is one in either."""
    return float((found - expected).abs().max() / expected.abs().max())


def is_our_refusal(error: BaseException) -> bool:
    """Return True for a one-line error that this package raised on purpose."""
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    return (
        isinstance(error, ValueError)
        and PACKAGE in Path(raised_in).parents
        and "\n" not in str(error)
    )


def _scoring(teacher: PreTrainedModel) -> str:
    """Kinds of heads that can be scored, or the reason why none can."""
    try:
        return ", ".join(head_kinds(teacher))
    except Exception as error:
        return ("refused: " if is_our_refusal(error) else "failed: ") + _one_line(error)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _crash(error: BaseException) -> str:
    """The error and the last places it went through, ours and theirs."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if PACKAGE in Path(frame.filename).parents]
    places = [f"{Path(frame.filename).name}:{frame.name}" for frame in [*ours[-1:], frames[-1]]]
    return f"{_one_line(error)} ({' -> '.join(dict.fromkeys(places))})"


def measure_all(model_types: list[str], done: Callable[[str, list[dict[str, Any]]], None]) -> None:
    """Measure every shape of each model type; ``done`` gets the rows of one at a time."""
    bar = tqdm(model_types, desc="model types", file=sys.stderr)
    with tempfile.TemporaryDirectory() as name:
        modules: Any = dynamic_module_utils
        modules.HF_MODULES_CACHE = f"{name}/modules"
        for model_type in bar:
            bar.set_postfix_str(model_type)
            rows = [measure(model_type, "", Path(name))]
            for variant in variants_of(model_type):
                row = measure(model_type, variant, Path(name))
                # One that transformers itself cannot run does not count.
                if row["status"] != NO_TEACHER:
                    rows.append(row)
            done(model_type, rows)


ORDER = ("supported", "failed", "refused", NO_TEACHER)
"""Order of the table."""
COMMON = re.compile(r"; expected (?!\d)[^;|]*| Its heads can be scored[^;|]*")
"""Endings that errors share, whatever the family. The layouts that they name are those of the day of the record."""


def write_page() -> None:
    """Write docs/families.md: one row for each model type that was measured."""
    record = read(RESULTS)
    families: dict[str, list[dict[str, Any]]] = record["families"]
    head = HEAD.format(
        n_types=len(families),
        transformers=record["transformers"],
        torch=record["torch"],
        device=record["device"],
        tried=", ".join(TRIED["tried"]),
    )
    lines = [head, "| check | largest difference | limit |\n| --- | ---: | ---: |"]
    for name, worst in worst_differences(families).items():
        lines.append(f"| {name} | {worst:.1e} | {CHECKS[name]:g} |")
    columns = (
        "model type | class | scored by | student | oldest transformers for an export | remarks"
    )
    lines.append(f"\n| {columns} |")
    lines.append("| --- | --- | --- | --- | --- | --- |")

    def place(name: str) -> tuple[int, str]:
        """Order model types by what became of their plain shape, then by name."""
        plain_shape = families[name][0]
        return ORDER.index(plain_shape["status"]), name

    for name in sorted(families, key=place):
        lines.append(page_row(name, families[name]))
    PAGE.write_text("\n".join(lines) + "\n")


def worst_differences(families: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """Return the largest difference of each check among all supported shapes."""
    worst = dict.fromkeys(CHECKS, 0.0)
    for rows in families.values():
        for row in rows:
            if row["status"] == "supported":
                for name, difference in row["differences"].items():
                    worst[name] = max(worst[name], difference)
    return worst


def page_row(name: str, rows: list[dict[str, Any]]) -> str:
    """Return a model type's line of the page's table."""
    base, *variants = rows
    is_supported = base["status"] == "supported"
    same = [row["variant"] for row in variants if row["status"] == base["status"]]
    remarks = []
    if not is_supported:
        remarks.append(base["reason"])
    elif same:
        remarks.append(f"also {', '.join(same)}")
    for row in variants:
        if row["variant"] not in same:
            remarks.append(f"{row['variant']}: {row['status']}: {row['reason']}")
    scored = base.get("scoring", "")
    cells = (
        name,
        base.get("class", ""),
        "-" if ":" in scored else scored,  # a refusal
        base["status"],
        oldest_transformers(name) if is_supported else "",
        COMMON.sub("", "; ".join(remarks)).replace("|", "\\|"),
    )
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = parser_of(__doc__, RESULTS)
    parser.add_argument(
        "--only", nargs="+", metavar="MODEL_TYPE", help="these alone; others stay as recorded"
    )
    parser.add_argument(
        "--resume", action="store_true", help="skip model types that --out holds already"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")

    everything = list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if unknown := set(options.only or ()) - set(everything):
        parser.error(
            f"{', '.join(sorted(unknown))}: not a causal-LM model type of this transformers"
        )
    recorded: dict[str, list[dict[str, Any]]] = {}
    if options.only or options.resume:
        recorded = read(options.out).get("families", {})
    families = {name: rows for name, rows in recorded.items() if name in everything}
    wanted = options.only or everything
    if options.resume and not options.only:
        wanted = [name for name in everything if name not in families]

    def done(model_type: str, rows: list[dict[str, Any]]) -> None:
        families[model_type] = rows
        record = {
            "what": "every causal-LM class of transformers at tiny random weights; differences are relative to the "
            "largest logit",
            "limits": CHECKS,
            "device": device_name(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "date": datetime.date.today().isoformat(),
            "families": {name: families[name] for name in sorted(families)},
        }
        write(options.out, record)
        for row in rows:
            if row["status"] == "failed":
                tqdm.write(f"{model_type} {row['variant']}: {row['reason']}")

    measure_all(wanted, done)
    counts: dict[str, int] = {}
    for rows in families.values():
        for row in rows:
            counts[row["status"]] = counts.get(row["status"], 0) + 1
    if options.out == RESULTS:
        write_page()
    shapes = ", ".join(f"{number} {status}" for status, number in sorted(counts.items()))
    for name in options.only or ():
        print(page_row(name, families[name]))
    print(f"{len(families)} model types recorded, shapes: {shapes}")
    return int(counts.get("failed", 0) > 0)


if __name__ == "__main__":
    sys.exit(main())
