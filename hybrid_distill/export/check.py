"""Standalone check of an exported checkpoint. Needs torch and transformers; the form safetensors also needs
hybrid_distill, and the forms onnx, gguf, mlx and vllm need the program that runs them.

    python gate/check.py [FOLDER] [--device cpu]

Every export carries this program and a record of what the exported model computed for a few prompts. It checks that

- no file is pickled, and only the form remote-code contains code;
- every tensor has its original bits, on disk and in the reloaded model;
- the tokenizer returns the same ids;
- the reloaded model's logits match the record (on another device than the record's: within what rounding does to
  these logits, which the record knows);
- logits with a cache, and in a left-padded batch, match those of each prompt alone;
- greedy tokens match the record: with a cache, without one, and in the batch.

For a form that another program runs, it checks that every file is unchanged, that the tokenizer returns the same ids,
and that the program computes the recorded greedy tokens and, if it exposes logits, the recorded logits.

Exit status: 0 if all checks pass, 1 if one fails, 2 if there is nothing to check, or nothing to load it with.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import platform
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

# Largest allowed difference of logits, relative to the largest logit. "forward": two processes do the same
# arithmetic. "order": the same sums in another order: chunk by chunk or token by token, alone or in a padded
# batch, in the student's code or another program's, on one device or another.
TOLERANCE = {
    torch.float64: {"forward": 1e-5, "order": 1e-4},  # transformers computes norms and RoPE in float32
    torch.float32: {"forward": 1e-5, "order": 1e-4},
    torch.bfloat16: {"forward": 3e-2, "order": 5e-2},  # a logit itself is rounded to 4e-3
    torch.float16: {"forward": 4e-3, "order": 1e-2},
}
MARGIN = 8
"""Largest allowed difference between two devices, as a multiple of the record's ``rounding``: the effect, on these very
logits, of one extra rounding after every layer. Sums in another order moved the logits of students of 2 and 12 layers
by 0.9 to 2.1 times that, in float32 and bfloat16; a fixed limit would be too small for deep models or too large."""
Record: TypeAlias = dict[str, Any]
"""Contents of reference.json."""
Model: TypeAlias = Any
"""A transformers model, whose class may come with the checkpoint."""
FORMAT = "hybrid-distill/export-gate/2"
PACKAGES = {"vllm": "vllm", "gguf": "llama_cpp", "mlx": "mlx_lm", "onnx": "onnxruntime"}
"""Package that runs each form for another program; programs.py calls it."""
FORBIDDEN_PACKAGES = ("hybrid_distill", "hybrid_kernels")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


@dataclass(frozen=True)
class Check:
    """One line of the table: what was compared, the measured difference, and the largest allowed."""

    name: str
    measured: float
    limit: float
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Return whether the difference is within the limit; a NaN is not."""
        return self.measured <= self.limit


@dataclass(frozen=True)
class Prompts:
    """Token ids [L] of single prompts and what the exported model computed for them.

    ``logits`` [L, C] cover the vocabulary's ``columns``; ``leads`` are generated tokens' margins over the second best.
    """

    columns: Tensor
    ids: list[Tensor]
    logits: list[Tensor]
    generated: list[Tensor]
    leads: list[Tensor]

    @property
    def scale(self) -> float:
        """Largest absolute logit; differences are relative to it."""
        return max(float(logits_LC.abs().max()) for logits_LC in self.logits)


def run_checks(folder: Path, gate: Path, *, device: str = "cpu") -> list[Check]:
    """Check an export against the record in ``gate``; an error counts as a failed check and ends the checks."""
    checks: list[Check] = []
    try:
        for check in _checks(folder, gate, device):
            checks.append(check)
    except Exception as error:  # a damaged export can raise anything
        checks.append(Check("every check can be made", float("inf"), 0, f"{type(error).__name__}: {error}"))
    return checks


def _checks(folder: Path, gate: Path, device: str) -> Iterator[Check]:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    record = read_record(gate)
    prompts = load_prompts(gate, "cpu" if record["form"] in PACKAGES else device)  # programs return numpy arrays
    yield _none("pickled files", [path.name for path in folder.rglob("*") if path.suffix in PICKLES])
    if record["form"] in PACKAGES:
        yield check_files(folder, record)
    else:
        if record["form"] != "remote-code":
            named = json.loads((folder / "config.json").read_text()).get("auto_map", {})
            code = sorted(path.name for path in folder.glob("*.py"))
            yield _none("remote code", [*code, *(f"auto_map: {name}" for name in sorted(named))])
        yield check_tensors_on_disk(folder, record)
    # transformers does not know the model type of the form safetensors; untrusted, version 5 prompts the user.
    trust: Record = {"trust_remote_code": True} if record["form"] == "remote-code" else {}
    if record["texts"]:
        kind = AutoTokenizer if record["form"] in ("remote-code", "falcon-h1") else PreTrainedTokenizerFast
        tokenizer = kind.from_pretrained(folder, **trust)
        wrong = [text for text, ids in record["texts"] if tokenizer(text)["input_ids"] != ids]
        yield _none("tokenizer: texts with other ids", wrong)
    if record["form"] in PACKAGES:
        yield from check_program(folder, record, prompts)
        return
    model, loading = load_model(folder, record, device, trust)
    yield loading
    yield from check_outputs(model, prompts, limits_of(model.dtype, record, device))


def limits_of(dtype: torch.dtype, record: Record, device: str) -> dict[str, float]:
    """Return the largest allowed differences of logits on a device: `TOLERANCE`, but for a record's own reasons."""
    limits = dict(TOLERANCE[dtype])
    is_stock = record["form"] == "falcon-h1"  # computed by transformers' code, not the student's
    if is_stock or not is_same_arithmetic(record["arithmetic"], device):
        limits["forward"] = elsewhere(dtype, record)
    return limits


def elsewhere(dtype: torch.dtype, record: Record) -> float:
    """Return the largest allowed difference between two devices or programs that compute the recorded logits."""
    return max(TOLERANCE[dtype]["order"], MARGIN * record["rounding"])


def is_same_arithmetic(recorded: str, device: str) -> bool:
    """Check whether this process sums in the order of the process that made the record.

    Never on a GPU: its libraries may choose another algorithm for the same product in another process.
    """
    return torch.device(device).type == "cpu" and recorded == arithmetic(device)


def arithmetic(device: str) -> str:
    """Describe all that decides the order of sums: the device, torch and, on a CPU, instructions and threads."""
    kind = torch.device(device)
    if kind.type == "cpu":
        instructions = torch.backends.cpu.get_cpu_capability()
        name = f"{platform.machine()} {instructions}, {torch.get_num_threads()} threads"
    elif kind.type == "cuda":
        name = torch.cuda.get_device_name(kind)
    else:
        name = platform.machine()
    return f"{kind.type}: {name}, torch {torch.__version__}"


def read_record(gate: Path) -> Record:
    """Read reference.json. Raises ValueError for a record of another format."""
    record = json.loads((gate / "reference.json").read_text())
    if (found := record.get("format")) != FORMAT:
        raise ValueError(f"{gate / 'reference.json'} has format {found!r}, expected {FORMAT!r}; export it again")
    return record


def load_prompts(gate: Path, device: str) -> Prompts:
    """Read reference.safetensors: the tensor ``columns``, and lists of tensors stored as ids_0, ids_1 ..."""
    tensors = {name: tensor.to(device) for name, tensor in load_file(gate / "reference.safetensors").items()}
    columns, lists = tensors.pop("columns"), dict[str, list[Tensor]]()
    for name in sorted(tensors, key=lambda name: int(name.partition("_")[2])):
        lists.setdefault(name.partition("_")[0], []).append(tensors[name])
    return Prompts(columns, **{name: lists[name] for name in ("ids", "logits", "generated", "leads")})


def tensor_hash(tensor: Tensor) -> str:
    """Return the sha256 of a tensor's dtype, shape and bits."""
    array = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{array.dtype} {list(array.shape)} ".encode())
    digest.update(array.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def weight_files(folder: Path) -> dict[str, Path]:
    """Map each stored tensor to its file. Raises ValueError for a tensor stored twice or a wrong index."""
    where: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                if where.setdefault(name, path) != path:
                    raise ValueError(f"{name} is stored twice")
    index = folder / "model.safetensors.index.json"
    held = {name: path.name for name, path in where.items()}
    if index.is_file() and json.loads(index.read_text())["weight_map"] != held:
        raise ValueError(f"{index.name} does not match the tensors in the files")
    return where


def check_tensors_on_disk(folder: Path, record: Record) -> Check:
    """Compare names and bits of the stored tensors with the record; a tied tensor is stored once."""
    expected = {name: sha for name, sha in record["tensors"].items() if name not in record["tied"]}
    where = weight_files(folder)
    wrong = [f"{name} is missing" for name in expected.keys() - where.keys()]
    wrong += [f"{name} is unknown" for name in where.keys() - expected.keys()]
    for name in sorted(expected.keys() & where.keys()):
        with safe_open(where[name], framework="pt") as file:
            if tensor_hash(file.get_tensor(name)) != expected[name]:
                wrong.append(f"{name} has changed")
    return _none(f"{len(expected)} tensors on disk: wrong", wrong)


def check_files(folder: Path, record: Record) -> Check:
    """Compare the files of an export for another program with the record."""
    wrong = []
    for name, expected in record["files"].items():
        if not (folder / name).is_file():
            wrong.append(f"{name} is missing")
        elif hashlib.sha256((folder / name).read_bytes()).hexdigest() != expected:
            wrong.append(f"{name} has changed")
    wrong += [f"{path.name} is unknown" for path in folder.glob("*.py") if path.name not in record["files"]]
    return _none(f"{len(record['files'])} files on disk: wrong", wrong)


def load_model(folder: Path, record: Record, device: str, trust: Record) -> tuple[Model, Check]:
    """Load the model in the way of its form; check that every tensor is loaded and none newly initialized."""
    if record["form"] == "safetensors":
        kind = importlib.import_module("hybrid_distill.model").HybridForCausalLM
    else:
        from transformers import AutoModelForCausalLM as kind
    dtype = getattr(torch, record["dtype"])
    loaded: Model = kind.from_pretrained(folder, dtype=dtype, output_loading_info=True, **trust)
    model, info = loaded
    kinds = ("missing_keys", "unexpected_keys", "mismatched_keys")
    wrong = [f"{kind}: {name}" for kind in kinds for name in info[kind]]
    state = model.state_dict()
    wrong += [f"{name} appeared" for name in state.keys() - record["tensors"].keys()]
    for name, expected in record["tensors"].items():
        if name not in state or tensor_hash(state[name]) != expected:
            wrong.append(f"{name} is not what was exported")
    if record.get("computes", record["dtype"]) != record["dtype"]:
        model.float()  # not .to(dtype), which would round RoPE's frequencies too
    return model.to(device).eval(), _none(f"{len(state)} tensors after loading: wrong", wrong)


@torch.no_grad()
def check_outputs(model: Model, prompts: Prompts, limits: dict[str, float]) -> Iterator[Check]:
    """Compare logits and greedy tokens with the record; compare cached and batched logits with each prompt alone."""
    length = len(prompts.generated[0])

    compare = partial(check_logits, scale=prompts.scale)

    def full_forward(ids_L: Tensor) -> Tensor:
        return model(input_ids=ids_L[None], use_cache=False).logits[0].float()

    alone = [full_forward(ids_L) for ids_L in prompts.ids]
    recorded = [logits_LV[:, prompts.columns] for logits_LV in alone]
    yield compare("reloaded = exported model", recorded, prompts.logits, limits["forward"])
    cached = [greedy(model, ids_L[None], None, length) for ids_L in prompts.ids]
    written = [torch.cat([ids_L, out.tokens_BT[0, :-1]]) for ids_L, out in zip(prompts.ids, cached)]
    again = [full_forward(ids_L)[-length:] for ids_L in written]
    yield compare("cached decode = full forward", [out.logits_BTV[0] for out in cached], again, limits["order"])
    yield compare("left-padded batch = single prompts", padded_logits(model, prompts.ids), alone, limits["order"])

    uncached = [greedy(model, ids_L[None], None, length, use_cache=False) for ids_L in prompts.ids]
    ways: dict[str, Sequence[Tensor] | Tensor] = {
        "cached": [out.tokens_BT[0] for out in cached],
        "uncached": [out.tokens_BT[0] for out in uncached],
        "left-padded batch": greedy(model, *left_padded(prompts.ids), length).tokens_BT,
    }
    for way, generated in ways.items():
        yield check_tokens(way, generated, prompts, max(limits.values()))


def check_tokens(way: str, generated: Sequence[Tensor] | Tensor, prompts: Prompts, limit: float) -> Check:
    """Compare greedy tokens with the record, up to the first one whose lead is within rounding error."""
    different = compared = 0
    for tokens_T, expected_T, leads_T in zip(generated, prompts.generated, prompts.leads, strict=True):
        clear_T = (leads_T > 2 * limit * prompts.scale).cumprod(0).bool()
        different += int((tokens_T != expected_T)[clear_T].sum())
        compared += int(clear_T.sum())
    return Check(f"generated tokens, {way}: different of {compared}", different, 0)


def check_logits(
    name: str, found: Sequence[Tensor], expected: Sequence[Tensor], limit: float, *, scale: float
) -> Check:
    """Compare logits of several prompts, relative to the largest one."""
    worst = torch.stack([(ours - theirs).abs().max() for ours, theirs in zip(found, expected, strict=True)]).max()
    return Check(f"{name}, logits", float(worst) / scale, limit)  # any NaN propagates


def padded_logits(model: Model, ids: Sequence[Tensor]) -> list[Tensor]:
    """Compute logits [L, V] of each prompt's tokens in a left-padded batch."""
    ids_BL, mask_BL = left_padded(ids)
    positions_BL = (mask_BL.cumsum(-1) - 1).clamp(min=0)
    batch = model(input_ids=ids_BL, attention_mask=mask_BL, position_ids=positions_BL, use_cache=False).logits
    return [logits_LV[-len(ids_L) :].float() for ids_L, logits_LV in zip(ids, batch)]


def left_padded(ids: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Left-pad prompts into one batch; return its ids and mask.

    Pads with an ordinary token: a padding token's embedding is often zero, which would hide leaks.
    """
    length, padding = max(map(len, ids)), int(ids[0][0])
    pad = torch.nn.functional.pad
    ids_BL = torch.stack([pad(ids_L, (length - len(ids_L), 0), value=padding) for ids_L in ids])
    mask_BL = torch.stack([pad(torch.ones_like(ids_L), (length - len(ids_L), 0)) for ids_L in ids])
    return ids_BL, mask_BL


class Greedy(NamedTuple):
    """Generated tokens, their leads over the second best, and the logits they were chosen from."""

    tokens_BT: Tensor
    leads_BT: Tensor
    logits_BTV: Tensor


@torch.no_grad()
def greedy(
    model: Model,
    ids_BL: Tensor,
    mask_BL: Tensor | None,
    new_tokens: int,
    *,
    use_cache: bool = True,
    past_ends: bool = False,
) -> Greedy:
    """Generate exactly ``new_tokens`` greedy tokens with the model's `generate`.

    End-of-text tokens are suppressed; with ``past_ends`` they can be chosen, and generation continues after them.
    """
    plain = {"do_sample": False, "num_beams": 1, "repetition_penalty": 1.0}  # overrides generation_config.json
    plain |= {"temperature": None, "top_p": None, "top_k": None, "pad_token_id": 0}
    plain |= {"eos_token_id": None} if past_ends else {"min_new_tokens": new_tokens}
    out: Any = model.generate(
        input_ids=ids_BL,
        attention_mask=torch.ones_like(ids_BL) if mask_BL is None else mask_BL,
        max_new_tokens=new_tokens,
        use_cache=use_cache,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        **plain,
    )
    best_BT2 = torch.stack([scores_BV.float().topk(2).values for scores_BV in out.scores], dim=1)
    leads_BT = best_BT2[..., 0] - best_BT2[..., 1]
    return Greedy(out.sequences[:, ids_BL.shape[1] :], leads_BT, torch.stack(out.logits, dim=1).float())


def check_program(folder: Path, record: Record, prompts: Prompts) -> Iterator[Check]:
    """Compare another program's results with the record: logits of each prompt alone, greedy tokens of a batch."""
    package, limit = PACKAGES[record["form"]], elsewhere(getattr(torch, record["computes"]), record)
    ids, length = [ids_L.tolist() for ids_L in prompts.ids], len(prompts.generated[0])
    program = load_program(record["form"])(folder, max(map(len, ids)) + length)
    logits = [found for prompt in ids if (found := program.logits(prompt)) is not None]
    if logits:
        columns = [torch.as_tensor(logits_LV).float()[:, prompts.columns] for logits_LV in logits]
        yield check_logits(f"{package} = exported model", columns, prompts.logits, limit, scale=prompts.scale)
    yield check_tokens(package, [torch.tensor(tokens) for tokens in program.generate(ids, length)], prompts, limit)


def load_program(form: str) -> Callable[[Path, int], Model]:
    """Return the class in programs.py, next to this file, that runs a form."""
    return runpy.run_path(str(Path(__file__).with_name("programs.py")))["PROGRAMS"][form]


def _none(name: str, found: Sequence[str], shown: int = 8) -> Check:
    """Return a check that passes if ``found`` is empty."""
    more = f"; and {len(found) - shown} more" if len(found) > shown else ""
    return Check(name, len(found), 0, "; ".join(found[:shown]) + more)


def table(checks: Sequence[Check]) -> str:
    """Format the checks as text, one per line."""
    lines = [f"{'':<8} {'check':<52} {'measured':>10} {'limit':>8}"]
    for check in checks:
        state = "ok" if check.ok else "FAILED"
        lines.append(f"{state:<8} {check.name:<52} {check.measured:>10.3g} {check.limit:>8.3g}")
        if check.detail and not check.ok:
            lines.append(f"{'':<8} {check.detail}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Check an exported checkpoint; needs torch and transformers only.")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).resolve().parent.parent)
    parser.add_argument("--device", default="cpu", help="where to run the model: cpu, cuda, cuda:1 ...")
    parser.add_argument("--json", type=Path, help="also write the checks to this file")
    options = parser.parse_args()
    gate = options.folder / "gate"
    try:
        record = read_record(gate)
    except (OSError, ValueError) as error:
        print(f"{options.folder} is not an export: {error}", file=sys.stderr)
        return 2
    needs = []
    if record["form"] in PACKAGES:
        needs.append(PACKAGES[record["form"]])
    if record["form"] == "safetensors":
        needs.append("hybrid_distill")
    else:  # make their import fail, as on a machine without them
        sys.modules.update(dict.fromkeys(FORBIDDEN_PACKAGES))  # pyright: ignore
    if absent := [name for name in needs if importlib.util.find_spec(name) is None]:
        print(f"{options.folder} needs {', '.join(absent)}, which is not installed here", file=sys.stderr)
        return 2
    import transformers

    checks = run_checks(options.folder, gate, device=options.device)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{options.folder} ({record['form']}) on {options.device}: {versions}\n{table(checks)}")
    if options.json:
        options.json.write_text(json.dumps([asdict(check) for check in checks]))
    return 0 if all(check.ok for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
