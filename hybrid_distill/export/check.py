"""Standalone check of an exported checkpoint. Needs torch and transformers.

The format safetensors also needs hybrid_distill; the formats onnx, gguf, mlx and vllm need the
program that runs them.

    python gate/check.py [FOLDER] [--device cpu]

Every export carries this program and a record of what the exported model computed for a few
prompts. It checks that

- no file is pickled, and only the format remote-code contains code;
- every tensor has its original bits, on disk and in the reloaded model;
- the tokenizer returns the same ids;
- the reloaded model's logits match the record (on another device than the record's, within the
  effect of rounding on these logits, which the record holds);
- logits with a cache, and in a left-padded batch, match those of each prompt alone;
- greedy tokens match the record: with a cache, in the batch and, for the longest prompt, without a cache;
- in the exported dtype, the logits match too, within the effect of rounding to it.

All checks but the last compute in float32, whatever the export's dtype.

For a format that another program runs, it checks that every file is unchanged, that the tokenizer
returns the same ids, and that the program computes the recorded greedy tokens and, if it exposes
logits, the recorded logits.

Exit status: 0 if all checks pass, 1 if one fails, 2 if there is nothing to check, or nothing to
load it with.

It is one file, so that an export can carry it and `python` can run it there without this package.
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
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

Record: TypeAlias = dict[str, Any]
"""Contents of reference.json; ``format`` is its version."""
Model: TypeAlias = Any
"""Transformers model, whose class may come with the checkpoint."""
# Not the student's dtype: rounding to bfloat16 alone moved logits of students of 6 layers by 1 to 17 % of
# the largest one. A limit above that misses a lost state; one below it rejects correct students.
COMPUTES = torch.float32
"""Dtype of the record, and of the comparison with it, for exports of every dtype."""
# All limits are relative to the largest logit.
SAME_ARITHMETIC = 1e-5
"""Largest allowed difference between two processes that do the same arithmetic, in float32."""
TOLERANCE = {
    torch.float64: 1e-4,  # transformers computes norms and RoPE in float32
    torch.float32: 1e-4,
    torch.bfloat16: 5e-2,  # rounding a logit alone changes it by up to 4e-3
    torch.float16: 1e-2,
}
"""Smallest limit for the same sums in another order: chunk by chunk or token by token, alone or in
a padded batch, in the student's code or another program's, on one device or another."""
# Sums in another order moved the logits of students of 2 and 12 layers by 0.9 to 2.1 times the
# effect of rounding, in float32 and bfloat16. All of bfloat16's roundings, several in a layer, moved
# them by 2 times that effect, and by 5 times in a random student with large weights. A fixed limit
# would be too small for deep models or too large for all others. model/self_check.py has the same
# multiple, but this file cannot import it.
MARGIN = 16
"""Limit for sums in another order, as a multiple of the record's ``rounding``: the effect, on these
very logits, of one extra rounding after every layer, by dtype."""
FORMAT = "hybrid-distill/export-gate/4"
PACKAGES = {"vllm": "vllm", "gguf": "llama_cpp", "mlx": "mlx_lm", "onnx": "onnxruntime"}
"""Package that runs each format of another program; programs.py calls it."""
FORBIDDEN_PACKAGES = ("hybrid_distill", "hybrid_kernels")
MOST_SHOWN = 8
"""Names of wrong files or tensors that a check lists."""
RELOADED = "reloaded = exported model"
CACHED = "cached decode = full forward"
PADDED = "left-padded batch = single prompts"
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


@dataclass(frozen=True)
class Check:
    """One line of the table: name of the comparison, measured difference, largest allowed one."""

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
    """Token ids [L] of single prompts, with the exported model's results for them.

    ``logits`` [L, C] cover the vocabulary's ``columns`` [C]. ``generated`` are greedy tokens [T],
    ``leads`` their margins [T] over the second best, in logits.
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

    @property
    def new_tokens(self) -> int:
        """Number of tokens generated after each prompt."""
        return len(self.generated[0])

    def only(self, number: int) -> Prompts:
        """Return one of the prompts."""
        return Prompts(
            self.columns,
            [self.ids[number]],
            [self.logits[number]],
            [self.generated[number]],
            [self.leads[number]],
        )


def run_checks(folder: Path, gate: Path, *, device: str = "cpu") -> list[Check]:
    """Check an export against the record in ``gate``.

    An error counts as a failed check and ends the checks.
    """
    checks: list[Check] = []
    try:
        # One by one, not with list(): checks before an error are reported too.
        for check in _checks(folder, gate, device):
            checks.append(check)
    except Exception as error:  # a damaged export can raise anything
        reason = f"{type(error).__name__}: {error}"
        checks.append(Check("all checks ran without an error", float("inf"), 0, reason))
    return checks


def _checks(folder: Path, gate: Path, device: str) -> Iterator[Check]:
    record = read_record(gate)
    yield check_no_pickles(folder)
    if record["export_format"] in PACKAGES:
        yield check_files(folder, record)
        yield from check_tokenizer(folder, record)
        # Programs return numpy arrays, which are on the CPU.
        yield from check_program(folder, record, load_prompts(gate, "cpu"))
        return
    if record["export_format"] != "remote-code":
        yield check_no_code(folder)
    yield check_tensors_on_disk(folder, record)
    yield from check_tokenizer(folder, record)
    model, loading = load_model(folder, record, device)
    yield loading
    prompts = load_prompts(gate, device)
    # Stock code rounds in other places than the student's: in half precision no limit is known.
    if model.dtype != COMPUTES and not is_stock(record):
        yield from check_own_dtype(model, prompts, order_limit(model.dtype, record))
    # Not .to(dtype), which would also round RoPE's frequencies.
    model.float()
    yield from check_outputs(model, prompts, limits_of(record, device))


def check_no_pickles(folder: Path) -> Check:
    """Look for pickled files by their names."""
    pickles = [path.name for path in folder.rglob("*") if path.suffix in PICKLES]
    return _expect_none("pickled files", pickles)


def check_no_code(folder: Path) -> Check:
    """Look for Python files, and for classes in config.json that transformers would load from them."""
    code = sorted(path.name for path in folder.glob("*.py"))
    config = json.loads((folder / "config.json").read_text())
    for name in sorted(config.get("auto_map", {})):
        code.append(f"auto_map: {name}")
    return _expect_none("remote code", code)


def check_tokenizer(folder: Path, record: Record) -> Iterator[Check]:
    """Compare the ids of the recorded texts; yield nothing if there are none."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not record["texts"]:
        return
    # AutoTokenizer does not know the model type of the other formats, and would ask the user
    # whether to run their code.
    tokenizer_class: Any = PreTrainedTokenizerFast
    if record["export_format"] in ("remote-code", "falcon-h1"):
        tokenizer_class = AutoTokenizer
    tokenizer = tokenizer_class.from_pretrained(folder, **trust_option(record))
    wrong = []
    for text, ids in record["texts"]:
        if tokenizer(text)["input_ids"] != ids:
            wrong.append(text)
    yield _expect_none("tokenizer: texts with other ids", wrong)


def trust_option(record: Record) -> dict[str, bool]:
    """Return the keyword argument of `from_pretrained` that an export of this format needs."""
    if record["export_format"] == "remote-code":
        return {"trust_remote_code": True}
    return {}


class Limits(NamedTuple):
    """Largest allowed differences of logits, relative to the largest logit.

    ``forward`` is for comparisons with the record, ``order`` for sums in another order.
    """

    forward: float
    order: float


def limits_of(record: Record, device: str) -> Limits:
    """Return the limits for float32 on a device."""
    order = order_limit(COMPUTES, record)
    if is_stock(record) or not is_same_arithmetic(record["arithmetic"], device):
        return Limits(forward=order, order=order)
    return Limits(forward=SAME_ARITHMETIC, order=order)


def is_stock(record: Record) -> bool:
    """Return whether transformers' own code computes the export, not the student's."""
    return record["export_format"] == "falcon-h1"


def order_limit(dtype: torch.dtype, record: Record) -> float:
    """Return the largest allowed difference between sums in two orders, devices or programs."""
    return max(TOLERANCE[dtype], MARGIN * record["rounding"][dtype_name(dtype)])


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without the module: float32."""
    return str(dtype).removeprefix("torch.")


def is_same_arithmetic(recorded: str, device: str) -> bool:
    """Check whether this process sums in the order of the process that made the record.

    False on any GPU: its libraries may choose another algorithm for the same product in another
    process.
    """
    return torch.device(device).type == "cpu" and recorded == arithmetic(device)


def arithmetic(device: str) -> str:
    """Describe what decides the order of sums: device, torch and, on a CPU, instructions and threads."""
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
    file = gate / "reference.json"
    record = json.loads(file.read_text())
    version = record.get("format")
    if version != FORMAT:
        raise ValueError(f"{file} has format {version!r}, expected {FORMAT!r}; export it again")
    return record


def load_prompts(gate: Path, device: str) -> Prompts:
    """Read reference.safetensors: the tensor ``columns``, and lists stored as ids_0, ids_1 ..."""
    tensors = load_file(gate / "reference.safetensors", device=device)
    prompts = Prompts(tensors["columns"], [], [], [], [])
    number = 0
    while f"ids_{number}" in tensors:
        for name in ("ids", "logits", "generated", "leads"):
            getattr(prompts, name).append(tensors[f"{name}_{number}"])
        number += 1
    return prompts


def tensor_hash(tensor: Tensor) -> str:
    """Return the sha256 of a tensor's dtype, shape and bits."""
    array = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{array.dtype} {list(array.shape)} ".encode())
    # numpy has no bfloat16: hash bytes.
    digest.update(array.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def weight_files(folder: Path) -> dict[str, Path]:
    """Map the name of each stored tensor to its file.

    Raises ValueError for a tensor stored twice or a wrong index.
    """
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            # safe_open cannot be iterated over.
            for name in file.keys():  # noqa: SIM118
                if name in files:
                    raise ValueError(f"{name} is stored twice")
                files[name] = path
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text())["weight_map"]
        # transformers loads only the tensors in the index: an extra one in a file would go unnoticed.
        if weight_map != {name: path.name for name, path in files.items()}:
            raise ValueError(f"{index.name} does not match the tensors in the files")
    return files


def check_tensors_on_disk(folder: Path, record: Record) -> Check:
    """Compare names and bits of the stored tensors with the record; tied ones are stored once."""
    hashes = dict(record["tensors"])
    for name in record["tied"]:
        del hashes[name]
    files = weight_files(folder)
    wrong = []
    for name in sorted(hashes.keys() | files.keys()):
        if name not in files:
            wrong.append(f"{name} is missing")
        elif name not in hashes:
            wrong.append(f"{name} is unknown")
        else:
            with safe_open(files[name], framework="pt") as file:
                tensor = file.get_tensor(name)
            if tensor_hash(tensor) != hashes[name]:
                wrong.append(f"{name} has changed")
    return _expect_none(f"{len(hashes)} tensors on disk: wrong", wrong)


def check_files(folder: Path, record: Record) -> Check:
    """Compare the files of an export for another program with the record."""
    wrong = []
    for name, expected in record["files"].items():
        path = folder / name
        if not path.is_file():
            wrong.append(f"{name} is missing")
        elif hashlib.sha256(path.read_bytes()).hexdigest() != expected:
            wrong.append(f"{name} has changed")
    for path in folder.glob("*.py"):
        if path.name not in record["files"]:
            wrong.append(f"{path.name} is unknown")
    return _expect_none(f"{len(record['files'])} files on disk: wrong", wrong)


def load_model(folder: Path, record: Record, device: str) -> tuple[Model, Check]:
    """Load the model with its format's class; check that each tensor is loaded and none is new."""
    if record["export_format"] == "safetensors":
        # Not an import statement: an export's Python files must not seem to need this package.
        model_class = importlib.import_module("hybrid_distill.model").HybridForCausalLM
    else:
        from transformers import AutoModelForCausalLM as model_class
    loaded: Any = model_class.from_pretrained(
        folder,
        dtype=getattr(torch, record["dtype"]),
        output_loading_info=True,
        **trust_option(record),
    )
    model, loading_info = loaded
    loading = check_loaded_tensors(model.state_dict(), loading_info, record)
    return model.to(device).eval(), loading


def check_loaded_tensors(
    state: dict[str, Tensor], loading_info: dict[str, Any], record: Record
) -> Check:
    """Compare a loaded model's tensors with the record."""
    wrong = []
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        wrong += [f"{kind}: {name}" for name in loading_info[kind]]
    hashes = record["tensors"]
    wrong += [f"{name} appeared" for name in state.keys() - hashes.keys()]
    for name, expected in hashes.items():
        if name not in state or tensor_hash(state[name]) != expected:
            wrong.append(f"{name} is not what was exported")
    return _expect_none(f"{len(state)} tensors after loading: wrong", wrong)


def check_own_dtype(model: Model, prompts: Prompts, limit: float) -> Iterator[Check]:
    """Compare logits in the export's dtype with the record and with each other.

    Finds operations that fail or overflow in this dtype alone. A fault in every dtype may be
    within this limit; `check_outputs` finds it.
    """
    prefix = f"in {dtype_name(model.dtype)}, "
    logits = [forward(model, ids_L) for ids_L in prompts.ids]
    yield check_reloaded(logits, prompts, limit, prefix)
    decoded = decode(model, prompts)
    yield check_decoded(decoded, prompts, limit, prefix)
    yield check_padded(model, logits, prompts, limit, prefix)


def check_outputs(model: Model, prompts: Prompts, limits: Limits) -> Iterator[Check]:
    """Compare logits with the record and with each other, and greedy tokens with the record."""
    logits = [forward(model, ids_L) for ids_L in prompts.ids]
    yield check_reloaded(logits, prompts, limits.forward)
    decoded = decode(model, prompts)
    yield check_decoded(decoded, prompts, limits.order)
    yield check_padded(model, logits, prompts, limits.order)
    margin = margin_of(max(limits), prompts)
    yield check_tokens("cached", decoded.tokens, prompts, margin)
    # Without a cache each token takes a whole forward. One prompt suffices: `check_decoded` has
    # compared the forwards of all.
    lengths = [len(ids_L) for ids_L in prompts.ids]
    longest = lengths.index(max(lengths))
    ids_1L = prompts.ids[longest].unsqueeze(0)
    uncached = greedy(model, ids_1L, None, prompts.new_tokens, use_cache=False)
    yield check_tokens("uncached", uncached.tokens_BT, prompts.only(longest), margin)
    in_batch = greedy(model, *left_padded(prompts.ids), prompts.new_tokens)
    yield check_tokens("left-padded batch", in_batch.tokens_BT, prompts, margin)


def check_reloaded(
    logits: Sequence[Tensor], prompts: Prompts, limit: float, prefix: str = ""
) -> Check:
    """Compare each prompt's ``logits`` [L, V] with the record."""
    recorded_columns = [logits_LV[:, prompts.columns] for logits_LV in logits]
    name = f"{prefix}{RELOADED}"
    return check_logits(name, recorded_columns, prompts.logits, limit, scale=prompts.scale)


def check_decoded(decoded: Decoded, prompts: Prompts, limit: float, prefix: str = "") -> Check:
    """Compare the logits of generated tokens, read one by one, with those of a whole forward."""
    name = f"{prefix}{CACHED}"
    return check_logits(name, decoded.stepwise, decoded.at_once, limit, scale=prompts.scale)


def check_padded(
    model: Model, logits: Sequence[Tensor], prompts: Prompts, limit: float, prefix: str = ""
) -> Check:
    """Compare the logits of a left-padded batch with the ``logits`` [L, V] of each prompt alone."""
    padded = padded_logits(model, prompts.ids)
    return check_logits(f"{prefix}{PADDED}", padded, logits, limit, scale=prompts.scale)


@torch.no_grad()
def forward(model: Model, ids_L: Tensor) -> Tensor:
    """Compute the logits [L, V] of one row of tokens without a cache."""
    return model(input_ids=ids_L[None], use_cache=False).logits[0].float()


class Decoded(NamedTuple):
    """Tokens [T] generated after each prompt, and the logits [T, V] that each was chosen from.

    ``stepwise`` logits are from the cache, token by token; those ``at_once`` from a whole forward.
    """

    tokens: list[Tensor]
    stepwise: list[Tensor]
    at_once: list[Tensor]


def decode(model: Model, prompts: Prompts) -> Decoded:
    """Continue each prompt greedily with a cache, then read it and its tokens at once without one."""
    generated = []
    stepwise = []
    at_once = []
    for ids_L in prompts.ids:
        from_cache = greedy(model, ids_L[None], None, prompts.new_tokens)
        tokens_T = from_cache.tokens_BT[0]
        # Without the last token, which `generate` chose and did not read.
        read_L = torch.cat([ids_L, tokens_T[:-1]])
        logits_LV = forward(model, read_L)
        generated.append(tokens_T)
        stepwise.append(from_cache.logits_BTV[0])
        at_once.append(logits_LV[-prompts.new_tokens :])
    return Decoded(generated, stepwise, at_once)


def margin_of(limit: float, prompts: Prompts) -> float:
    """Return the lead, in logits, that a token needs so that rounding cannot choose another."""
    # Twice: the best token may fall by the limit while the second best rises by it.
    return 2 * limit * prompts.scale


def check_tokens(
    mode: str, generated: Sequence[Tensor] | Tensor, prompts: Prompts, margin: float
) -> Check:
    """Compare greedy tokens with the record, up to the first whose lead is at most ``margin``.

    ``mode`` says how they were generated, in the name of the check.
    """
    n_different = 0
    n_compared = 0
    recorded = zip(prompts.generated, prompts.leads)
    for tokens_T, (expected_T, leads_T) in zip(generated, recorded, strict=True):
        is_clear_T = leads_T > margin
        # After a token that rounding may change, the texts differ.
        compared_T = is_clear_T.cumprod(0).bool()
        n_different += int((tokens_T != expected_T)[compared_T].sum())
        n_compared += int(compared_T.sum())
    return Check(f"generated tokens, {mode}: different of {n_compared}", n_different, 0)


def check_logits(
    name: str,
    logits: Sequence[Tensor],
    expected: Sequence[Tensor],
    limit: float,
    *,
    scale: float,
) -> Check:
    """Compare logits of several prompts, relative to the ``scale`` of the record's."""
    return Check(f"{name}, logits", largest_difference(logits, expected) / scale, limit)


def largest_difference(logits: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest absolute difference; NaN if any logit is NaN."""
    largest = []
    for logits_LV, expected_LV in zip(logits, expected, strict=True):
        largest.append((logits_LV - expected_LV).abs().max())
    # torch's max propagates NaN, Python's does not.
    return float(torch.stack(largest).max())


@torch.no_grad()
def padded_logits(model: Model, ids: Sequence[Tensor]) -> list[Tensor]:
    """Compute the logits [L, V] of each prompt in a left-padded batch, without those of padding."""
    ids_BL, mask_BL = left_padded(ids)
    # `generate` counts positions by the mask, but a plain forward would count padding too.
    position_BL = (mask_BL.cumsum(-1) - 1).clamp(min=0)
    output = model(
        input_ids=ids_BL,
        attention_mask=mask_BL,
        position_ids=position_BL,
        use_cache=False,
    )
    without_padding = []
    for ids_L, logits_LV in zip(ids, output.logits):
        without_padding.append(logits_LV[-len(ids_L) :].float())
    return without_padding


def left_padded(ids: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Left-pad prompts into one batch; return (ids_BL, mask_BL).

    Pads with an ordinary token: a padding token's embedding is often zero, which would hide leaks.
    """
    length = max(map(len, ids))
    ids_BL = ids[0][0].repeat(len(ids), length)
    mask_BL = torch.zeros_like(ids_BL)
    for row, ids_L in enumerate(ids):
        ids_BL[row, length - len(ids_L) :] = ids_L
        mask_BL[row, length - len(ids_L) :] = 1
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

    End-of-text tokens are suppressed; with ``past_ends`` they can be chosen, and generation
    continues after them.
    """
    ends = {"eos_token_id": None} if past_ends else {"min_new_tokens": new_tokens}
    out = model.generate(
        input_ids=ids_BL,
        attention_mask=torch.ones_like(ids_BL) if mask_BL is None else mask_BL,
        max_new_tokens=new_tokens,
        use_cache=use_cache,
        return_dict_in_generate=True,
        output_scores=True,
        output_logits=True,
        # The rest overrides generation_config.json.
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=0,
        **ends,
    )
    # Scores, not logits: there, end-of-text tokens are suppressed.
    best_two = [scores_BV.float().topk(2).values for scores_BV in out.scores]
    best_BT2 = torch.stack(best_two, dim=1)
    return Greedy(
        tokens_BT=out.sequences[:, ids_BL.shape[1] :],
        leads_BT=best_BT2[..., 0] - best_BT2[..., 1],
        logits_BTV=torch.stack(out.logits, dim=1).float(),
    )


def check_program(folder: Path, record: Record, prompts: Prompts) -> Iterator[Check]:
    """Compare another program's results with the record.

    These are each prompt's logits, if the program exposes them, and the greedy tokens of a batch.
    """
    package = PACKAGES[record["export_format"]]
    limit = order_limit(COMPUTES, record)
    ids = [ids_L.tolist() for ids_L in prompts.ids]
    longest = max(map(len, ids)) + prompts.new_tokens
    program = load_program(record["export_format"])(folder, longest)
    logits = []
    for prompt in ids:
        logits_LV = program.logits(prompt)
        if logits_LV is not None:
            logits_LV = torch.as_tensor(logits_LV).float()
            logits.append(logits_LV[:, prompts.columns])
    if logits:
        name = f"{package} = exported model"
        yield check_logits(name, logits, prompts.logits, limit, scale=prompts.scale)
    generated = [torch.tensor(tokens) for tokens in program.generate(ids, prompts.new_tokens)]
    yield check_tokens(package, generated, prompts, margin_of(limit, prompts))


def load_program(export_format: str) -> Callable[[Path, int], Model]:
    """Return the class in programs.py, next to this file, that runs an export format."""
    # By its path: in an export, neither file belongs to a package.
    path = Path(__file__).with_name("programs.py")
    programs = runpy.run_path(str(path))["PROGRAMS"]
    return programs[export_format]


def _expect_none(name: str, wrong: Sequence[str]) -> Check:
    """Return a check that passes if ``wrong`` is empty, and else names its first entries."""
    detail = "; ".join(wrong[:MOST_SHOWN])
    if len(wrong) > MOST_SHOWN:
        detail += f"; and {len(wrong) - MOST_SHOWN} more"
    return Check(name, len(wrong), 0, detail)


def table(checks: Sequence[Check]) -> str:
    """Format the checks as text, one per line."""
    lines = [f"{'':<8} {'check':<56} {'measured':>10} {'limit':>8}"]
    for check in checks:
        state = "ok" if check.ok else "FAILED"
        lines.append(f"{state:<8} {check.name:<56} {check.measured:>10.3g} {check.limit:>8.3g}")
        if check.detail and not check.ok:
            lines.append(f"{'':<8} {check.detail}")
    return "\n".join(lines)


def main() -> int:
    options = parse_arguments()
    gate = options.folder / "gate"
    try:
        record = read_record(gate)
    except (OSError, ValueError) as error:
        print(f"{options.folder} is not an export: {error}", file=sys.stderr)
        return 2
    needed = PACKAGES.get(record["export_format"])
    if record["export_format"] == "safetensors":
        needed = "hybrid_distill"
    else:
        # Make their import fail, as on a machine without them.
        sys.modules.update(dict.fromkeys(FORBIDDEN_PACKAGES))  # pyright: ignore
    if needed is not None and importlib.util.find_spec(needed) is None:
        print(f"{options.folder} needs {needed}, which is not installed here", file=sys.stderr)
        return 2
    import transformers

    checks = run_checks(options.folder, gate, device=options.device)
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}"
    print(f"{options.folder} ({record['export_format']}) on {options.device}: {versions}")
    print(table(checks))
    if options.json:
        options.json.write_text(json.dumps([asdict(check) for check in checks]))
    return 0 if all(check.ok for check in checks) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Check an exported checkpoint; needs torch and transformers only."
    )
    own_folder = Path(__file__).resolve().parent.parent
    parser.add_argument("folder", nargs="?", type=Path, default=own_folder)
    parser.add_argument("--device", default="cpu", help="where to run: cpu, cuda, cuda:1 ...")
    parser.add_argument("--json", type=Path, help="also write the checks to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
