"""Check an exported checkpoint where it lies: needs torch and transformers only.

One of the form safetensors is reloaded by hybrid_distill, which is then needed too.

    python gate/check.py [FOLDER] [--device cpu]

Every exported folder carries this program and, beside it, what the model that was exported computed: the
hash of each tensor, logits and generated tokens for a few prompts. The checks, in the order of the table
that is printed:

- files: weights are safetensors; code, which the form remote-code alone has, imports torch and transformers only;
- tensors: every tensor is there under the name it had, with the same bits, on disk and, but for 8-bit weights, after
  loading;
- forward: the reloaded model's logits = those of the model that was exported; of a quantised one, nearly so, within
  what its record allows;
- cached: half a prompt, then `generate` made to write the other half, one token at a time = the prompt at once;
- padded: a left-padded batch = each prompt alone;
- generated: the same tokens, from the cache, without it, and in the batch;
  (with RoPE that depends on the length, "dynamic" and "longrope", a cache and a batch give other logits: these are
  held against those of the model that was exported, and tokens are generated from the cache alone)
- tokenizer: the same ids.

Exit status: 0 if all hold, 1 if one does not, 2 if there is nothing to check, or nothing to load it with.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.abc
import importlib.util
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

# Largest allowed difference of logits, relative to the largest logit. "forward" compares two processes that
# do the same arithmetic; "order" compares two orders of the same sums: chunk by chunk or token by token,
# alone or in a padded batch.
TOLERANCE = {
    torch.float64: {"forward": 1e-5, "order": 1e-4},  # transformers computes norms and RoPE in float32
    torch.float32: {"forward": 1e-5, "order": 1e-4},
    torch.bfloat16: {"forward": 3e-2, "order": 5e-2},  # a logit itself is rounded to 4e-3
    torch.float16: {"forward": 4e-3, "order": 1e-2},
}
FORMAT = "hybrid-distill/export-gate/1"
FORMS = ("remote-code", "falcon-h1", "safetensors")
FORBIDDEN_PACKAGES = ("hybrid_distill", "hybrid_kernels")
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
ALLOWED_IMPORTS = {"torch", "transformers", *sys.stdlib_module_names}


@dataclass(frozen=True)
class Check:
    """One line of the gate: what was compared, the difference measured, the largest that passes."""

    name: str
    measured: float
    limit: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        """False for a NaN too."""
        return self.measured <= self.limit


@dataclass(frozen=True)
class Prompts:
    """Token ids of single prompts and what the exported model made of them.

    ``logits_LC`` holds the columns ``columns_C`` of the vocabulary; ``leads_T`` is the lead of each
    generated token over the second best logit. From the first token whose lead is within rounding,
    generated tokens are not compared. ``cached_LC`` and ``padded_LC``, logits from a cache and of the left-padded
    batch, are there for models for which they are not those of the prompt alone.
    """

    ids_L: list[Tensor]
    logits_LC: list[Tensor]
    generated_T: list[Tensor]
    leads_T: list[Tensor]
    columns_C: Tensor
    cached_LC: list[Tensor] = field(default_factory=list)
    padded_LC: list[Tensor] = field(default_factory=list)

    def save(self, path: Path) -> None:
        arrays = {"columns": self.columns_C}
        for i in range(len(self.ids_L)):
            arrays[f"ids_{i}"] = self.ids_L[i]
            arrays[f"logits_{i}"] = self.logits_LC[i]
            arrays[f"generated_{i}"] = self.generated_T[i]
            arrays[f"leads_{i}"] = self.leads_T[i]
            if self.cached_LC:
                arrays |= {f"cached_{i}": self.cached_LC[i], f"padded_{i}": self.padded_LC[i]}
        save_file({name: array.cpu().contiguous() for name, array in arrays.items()}, path)

    @staticmethod
    def load(path: Path, device: str) -> Prompts:
        arrays = {name: array.to(device) for name, array in load_file(path).items()}
        n = sum(name.startswith("ids_") for name in arrays)
        ids, logits, generated, leads, cached, padded = (
            [arrays[f"{name}_{i}"] for i in range(n) if f"{name}_{i}" in arrays]
            for name in ("ids", "logits", "generated", "leads", "cached", "padded")
        )
        return Prompts(ids, logits, generated, leads, arrays["columns"], cached, padded)

    @property
    def new_tokens(self) -> int:
        return len(self.generated_T[0])

    @property
    def scale(self) -> float:
        """The largest logit, which differences are relative to."""
        return max(float(logits_LC.abs().max()) for logits_LC in self.logits_LC)


def run_checks(folder: Path, gate: Path, *, device: str = "cpu") -> list[Check]:
    """All checks of an export against the record in ``gate``; the first that cannot be made ends them."""
    checks: list[Check] = []
    try:
        record, prompts = load_record(gate, device)
        checks += check_files(folder, form_of(record))
        checks.append(check_tensors_on_disk(folder, record))
        checks += check_tokenizer(folder, record)
        model, loading = check_loading(folder, record, device)
        checks.append(loading)
        limits = limits_of(record, model.dtype)
        checks.append(check_forward(model, prompts, limits["forward"]))
        other_ways = max(limits.values()) if prompts.cached_LC else limits["order"]
        checks.append(check_cached(model, prompts, other_ways))
        checks.append(check_padded(model, prompts, other_ways))
        checks += check_generated(model, prompts, max(limits.values()))
    except Exception as error:
        checks.append(Check("every check can be made", float("inf"), 0, f"{type(error).__name__}: {error}"))
    return checks


def load_record(gate: Path, device: str) -> tuple[dict[str, Any], Prompts]:
    """What the exported model computed: reference.json and reference.safetensors of a gate folder."""
    record = json.loads((gate / "reference.json").read_text())
    if record.get("format") != FORMAT:
        raise ValueError(
            f"{gate / 'reference.json'} has format {record.get('format')!r}, expected {FORMAT!r}"
        )
    return record, Prompts.load(gate / "reference.safetensors", device)


def form_of(record: dict[str, Any]) -> str:
    """One of FORMS; those that came first had no name."""
    return record.get("form", FORMS[0])


def limits_of(record: dict[str, Any], dtype: torch.dtype) -> dict[str, float]:
    """Largest differences allowed; a quantised model may be as far from what was exported as its record says."""
    quantised = record.get("quantised")
    return TOLERANCE[dtype] if quantised is None else {**TOLERANCE[dtype], "forward": quantised["limit"]}


def check_files(folder: Path, form: str) -> list[Check]:
    """No pickle; no code, or code that imports torch, transformers, the standard library and its own files only."""
    pickles = [path.name for path in folder.rglob("*") if path.suffix in PICKLE_SUFFIXES]
    code = {path.stem: imports(path) for path in folder.glob("*.py")}
    known = ALLOWED_IMPORTS | {f".{stem}" for stem in code}
    foreign = sorted(f"{stem}.py imports {name}" for stem, names in code.items() for name in names - known)
    checks = [
        Check("pickled files", len(pickles), 0, ", ".join(pickles)),
        Check("imports beyond torch and transformers", len(foreign), 0, ", ".join(foreign)),
    ]
    if form != "remote-code":
        named = sorted(json.loads((folder / "config.json").read_text()).get("auto_map", {}))
        remote = [*(f"{stem}.py" for stem in sorted(code)), *(f"auto_map: {name}" for name in named)]
        return [checks[0], Check("remote code", len(remote), 0, ", ".join(remote))]
    auto_map = json.loads((folder / "config.json").read_text())["auto_map"]
    entry = auto_map["AutoModelForCausalLM"].split(".")[0]
    unseen = sorted({f".{stem}" for stem in code if stem != entry} - code[entry])
    # Before 5.5, transformers copies a local model's entry file and what that file itself imports, no more.
    return [
        *checks,
        Check(f"files that {entry}.py does not import itself", len(unseen), 0, ", ".join(unseen)),
    ]


def imports(path: Path) -> set[str]:
    """What a file imports: names of packages, and ".name" for a file beside it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add("." * node.level + (node.module or "").split(".")[0])
    return found


def tensor_hash(tensor: Tensor) -> str:
    """sha256 of dtype, shape and bits."""
    array = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{array.dtype} {list(array.shape)} ".encode())
    digest.update(array.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def weight_files(folder: Path) -> dict[str, Path]:
    """The file that holds each tensor, read from the files themselves and held against the index."""
    where: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
        repeated = where.keys() & set(names)
        if repeated:
            raise ValueError(f"stored twice: {', '.join(sorted(repeated))}")
        where |= dict.fromkeys(names, path)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        listed = json.loads(index.read_text())["weight_map"]
        if listed != {name: path.name for name, path in where.items()}:
            raise ValueError("model.safetensors.index.json does not list what the files hold")
    return where


def check_tensors_on_disk(folder: Path, record: dict[str, Any]) -> Check:
    """Names and bits of the stored tensors against those recorded; a tied tensor is stored once."""
    expected: dict[str, str] = {
        name: sha for name, sha in record["tensors"].items() if name not in record["tied"]
    }
    where = weight_files(folder)
    wrong = [f"{name} is missing" for name in expected.keys() - where.keys()]
    wrong += [f"{name} is unknown" for name in where.keys() - expected.keys()]
    for name in sorted(expected.keys() & where.keys()):
        with safe_open(where[name], framework="pt") as file:
            tensor = file.get_tensor(name)
        if tensor.numel() == 0:
            wrong.append(f"{name} is empty")
        elif tensor_hash(tensor) != expected[name]:
            wrong.append(f"{name} has changed")
    return Check(f"{len(expected)} tensors on disk: wrong", len(wrong), 0, _some(wrong))


def check_loading(folder: Path, record: dict[str, Any], device: str) -> tuple[Any, Check]:
    """The model that the form's loader makes: every tensor in its place, none newly initialised."""
    form = form_of(record)
    if form == "safetensors":
        kind: Any = importlib.import_module("hybrid_distill.model").HybridForCausalLM
    else:
        from transformers import AutoModelForCausalLM as kind
    trust = {"trust_remote_code": True} if form == "remote-code" else {}
    dtype = getattr(torch, record["dtype"])
    loaded: Any = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True, **trust)
    model, info = loaded
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    wrong = [f"{kind}: {name}" for kind in kinds for name in info[kind]]
    state = model.state_dict()
    if "quantised" not in record:  # whose tensors its library puts together from several
        wrong += [f"{name} appeared" for name in state.keys() - record["tensors"].keys()]
        for name, expected in record["tensors"].items():
            if name not in state or tensor_hash(state[name]) != expected:
                wrong.append(f"{name} is not what was exported")
    if record.get("computes", record["dtype"]) != record["dtype"]:
        model.float()  # not .to(dtype), which would round RoPE's frequencies too
    return model.to(device).eval(), Check(
        f"{len(state)} tensors after loading: wrong", len(wrong), 0, _some(wrong)
    )


@torch.no_grad()
def check_forward(model: Any, prompts: Prompts, limit: float) -> Check:
    """Logits of the reloaded model against those of the exported one."""
    logits_LV = (model(input_ids=ids_L[None], use_cache=False).logits[0].float() for ids_L in prompts.ids_L)
    worst = _worst(logits_LV, prompts.logits_LC, prompts.columns_C)
    return Check("reloaded = exported model, logits", worst / prompts.scale, limit)


@torch.no_grad()
def check_cached(model: Any, prompts: Prompts, limit: float) -> Check:
    """Half the prompt, then token by token through the cache, against the whole prompt at once."""
    if prompts.cached_LC:
        worst = _worst(cached_logits(model, prompts.ids_L), prompts.cached_LC, prompts.columns_C)
        return Check("cached decode = exported model's, logits", worst / prompts.scale, limit)
    cached_LV = cached_logits(model, prompts.ids_L)
    full_LV = [model(input_ids=ids_L[None], use_cache=False).logits[0].float() for ids_L in prompts.ids_L]
    worst = _worst(cached_LV, [full[-len(cached) :] for full, cached in zip(full_LV, cached_LV)])
    return Check("cached decode = full forward, logits", worst / prompts.scale, limit)


@torch.no_grad()
def check_padded(model: Any, prompts: Prompts, limit: float) -> Check:
    """Logits of a left-padded batch, at the real tokens, against each prompt alone."""
    padded_LV = padded_logits(model, prompts.ids_L)
    if prompts.padded_LC:
        worst = _worst(padded_LV, prompts.padded_LC, prompts.columns_C)
        return Check("left-padded batch = exported model's, logits", worst / prompts.scale, limit)
    alone_LV = (model(input_ids=ids_L[None], use_cache=False).logits[0].float() for ids_L in prompts.ids_L)
    return Check("left-padded batch = single prompts, logits", _worst(padded_LV, alone_LV) / prompts.scale, limit)


@torch.no_grad()
def cached_logits(model: Any, ids: Sequence[Tensor]) -> list[Tensor]:
    """Logits [L, V] from the middle of each prompt on, read token by token.

    By `generate`, because some models take no cache but one that it has prepared.
    """
    found = []
    for ids_L in ids:
        half = max(len(ids_L) // 2, 1)
        steps = generate(model, ids_L[None, :half], None, len(ids_L) - half + 1, written_L=ids_L).logits
        found.append(torch.cat(steps).float())
    return found


@torch.no_grad()
def padded_logits(model: Any, ids: Sequence[Tensor]) -> list[Tensor]:
    """Logits [L, V] of each prompt's tokens in a left-padded batch."""
    ids_BL, mask_BL = left_padded(ids)
    positions_BL = (mask_BL.cumsum(-1) - 1).clamp(min=0)
    batch = model(input_ids=ids_BL, attention_mask=mask_BL, position_ids=positions_BL, use_cache=False).logits
    return [logits_LV[-len(ids_L) :].float() for ids_L, logits_LV in zip(ids, batch)]


def _worst(found: Iterable[Tensor], expected: Iterable[Tensor], columns_C: Tensor | None = None) -> float:
    """The largest difference; ``expected`` holds the columns ``columns_C`` if they are given."""
    worst = 0.0
    for found_LV, expected_LC in zip(found, expected, strict=True):
        worst = _worse(worst, (found_LV if columns_C is None else found_LV[:, columns_C]) - expected_LC)
    return worst


def check_generated(model: Any, prompts: Prompts, limit: float) -> list[Check]:
    """Greedy tokens against the exported model's: alone, without a cache, and in one left-padded batch."""
    ways: dict[str, Any] = {
        "cached": [greedy(model, ids_L[None], None, prompts.new_tokens)[0][0] for ids_L in prompts.ids_L]
    }
    if not prompts.cached_LC:
        ways["uncached"] = [
            greedy(model, ids_L[None], None, prompts.new_tokens, use_cache=False)[0][0] for ids_L in prompts.ids_L
        ]
        ids_BL, mask_BL = left_padded(prompts.ids_L)
        ways["left-padded batch"] = greedy(model, ids_BL, mask_BL, prompts.new_tokens)[0]
    checks = []
    for name, tokens in ways.items():
        different, compared = _compare_tokens(tokens, prompts, 2 * limit * prompts.scale)
        checks.append(Check(f"generated tokens, {name}: different of {compared}", different, 0))
    return checks


def check_tokenizer(folder: Path, record: dict[str, Any]) -> list[Check]:
    """The stored tokenizer against the ids recorded for a few texts; nothing to check without one."""
    if not record["texts"]:
        return []
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if form_of(record) == "safetensors":  # whose model type transformers does not know
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    else:
        # Without trust, transformers 5 asks at the terminal, for the configuration's sake.
        trust = {"trust_remote_code": True} if form_of(record) == "remote-code" else {}
        tokenizer = AutoTokenizer.from_pretrained(folder, **trust)
    wrong = [text for text, ids in record["texts"] if tokenizer(text)["input_ids"] != ids]
    return [Check("tokenizer: texts with other ids", len(wrong), 0, _some(wrong))]


def left_padded(ids: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Prompts of different lengths as one batch, padded left, and its mask.

    The padding is an ordinary token: a padding token's embedding is often zero, and would hide what leaks.
    """
    length = max(len(ids_L) for ids_L in ids)
    padding = int(ids[0][0])
    ids_BL = torch.stack(
        [torch.nn.functional.pad(ids_L, (length - len(ids_L), 0), value=padding) for ids_L in ids]
    )
    lengths_B1 = torch.tensor([[len(ids_L)] for ids_L in ids], device=ids_BL.device)
    return ids_BL, (torch.arange(length, 0, -1, device=ids_BL.device) <= lengths_B1).long()


def greedy(
    model: Any, ids_BL: Tensor, mask_BL: Tensor | None, new_tokens: int, *, use_cache: bool = True
) -> tuple[Tensor, Tensor]:
    """Exactly ``new_tokens`` greedy tokens, and each one's lead over the second best logit: two [B, T]."""
    out = generate(model, ids_BL, mask_BL, new_tokens, use_cache=use_cache)
    best_BT2 = torch.stack([scores_BV.float().topk(2).values for scores_BV in out.scores], dim=1)
    return out.sequences[:, ids_BL.shape[1] :], best_BT2[..., 0] - best_BT2[..., 1]


@torch.no_grad()
def generate(
    model: Any,
    ids_BL: Tensor,
    mask_BL: Tensor | None,
    new_tokens: int,
    *,
    use_cache: bool = True,
    written_L: Tensor | None = None,
) -> Any:
    """What the model's `generate` returns for exactly ``new_tokens`` tokens: greedy, or those of ``written_L``."""
    return model.generate(
        input_ids=ids_BL,
        attention_mask=torch.ones_like(ids_BL) if mask_BL is None else mask_BL,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        temperature=None,
        top_p=None,
        top_k=None,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        pad_token_id=0,
        use_cache=use_cache,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        logits_processor=[] if written_L is None else [partial(_force, written_L)],
    )


def _force(written_L: Tensor, past_BL: Tensor, scores_BV: Tensor) -> Tensor:
    """Scores that leave no choice but the token of ``written_L`` that comes next; behind its end, the last again."""
    forced_BV = torch.full_like(scores_BV, float("-inf"))
    forced_BV[:, written_L[min(past_BL.shape[1], len(written_L) - 1)]] = 0.0
    return forced_BV


def _compare_tokens(tokens: Iterable[Tensor], prompts: Prompts, rounding: float) -> tuple[int, int]:
    """(different, compared) tokens, up to the first whose lead was within rounding."""
    different = compared = 0
    for tokens_T, expected_T, leads_T in zip(tokens, prompts.generated_T, prompts.leads_T):
        unclear = (leads_T <= rounding).nonzero()
        end = int(unclear[0]) if len(unclear) else len(expected_T)
        different += int((tokens_T[:end] != expected_T[:end]).sum())
        compared += end
    return different, compared


def _worse(worst: float, difference: Tensor) -> float:
    """The larger of a number and a tensor's largest magnitude; NaN if there is one in either."""
    largest = float(difference.abs().max())
    return max(worst, largest) if largest == largest and worst == worst else float("nan")


def _some(items: Sequence[str], n: int = 8) -> str:
    return "; ".join(items[:n]) + (f"; and {len(items) - n} more" if len(items) > n else "")


def table(checks: Sequence[Check]) -> str:
    """The checks as text, one a line."""
    lines = [("", "check", "measured", "limit")]
    for check in checks:
        name = f"{check.name}\n         {check.detail}" if check.detail and not check.ok else check.name
        lines.append(("ok" if check.ok else "FAILED", name, f"{check.measured:.3g}", f"{check.limit:.3g}"))
    return "\n".join(_table_line(*line) for line in lines)


def _table_line(state: str, name: str, measured: str, limit: str) -> str:
    first, *rest = name.split("\n")
    return "\n".join([f"{state:<8} {first:<52} {measured:>10} {limit:>8}", *rest])


class _Forbidden(importlib.abc.MetaPathFinder):
    """Makes this project's packages impossible to import, as on a machine that does not have them."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.split(".")[0] in FORBIDDEN_PACKAGES:
            raise ModuleNotFoundError(f"an exported checkpoint must load without {name}", name=name)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Check an exported checkpoint; needs torch and transformers only."
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--record", type=Path, help="folder of what to compare with (default: FOLDER/gate)")
    parser.add_argument("--device", default="cpu", help="where to run the model: cpu, cuda, cuda:1 ...")
    parser.add_argument("--json", type=Path, help="also write the checks to this file")
    options = parser.parse_args()
    gate = options.record or options.folder / "gate"
    try:
        record = json.loads((gate / "reference.json").read_text())
        form = form_of(record)
    except (OSError, ValueError) as error:
        print(f"{options.folder} is no export: {error}", file=sys.stderr)
        return 2
    if form != "safetensors":
        sys.meta_path.insert(0, _Forbidden())
    needs = ["hybrid_distill"] * (form == "safetensors") + ["torchao"] * ("quantised" in record)
    if absent := [name for name in needs if importlib.util.find_spec(name) is None]:
        print(f"{options.folder} is loaded by {', '.join(absent)}, which is not installed here", file=sys.stderr)
        return 2
    import transformers

    checks = run_checks(options.folder, gate, device=options.device)
    print(
        f"{options.folder} ({form}) on {options.device}: torch {torch.__version__}, "
        f"transformers {transformers.__version__}"
    )
    print(table(checks))
    if options.json:
        options.json.write_text(json.dumps([asdict(check) for check in checks]))
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
