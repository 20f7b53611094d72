"""Llamba checkpoints in their published format, against the format's own definition written out token by token."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_distill.assets import tiny_teacher_path
from hybrid_distill.teacher import load_config, load_teacher, read_teacher, record_heads
from hybrid_distill.teacher.llamba import load_llamba

IDS = [5, 90, 17, 17, 3, 44, 8, 61, 2, 30, 30]
PUBLISHED: dict[str, Any] = {
    "model_type": "llamba",
    "vocab_size": 2045,  # the embedding has 2048 rows, as many as the tokenizer of the embedded teacher has tokens
    "tie_embeddings": True,
    "pad_vocab_size_multiple": 8,
    "lm_head_bias": False,
    "d_model": 16,
    "n_layer": 2,
    "resid_dropout": 0.0,
    "norm_epsilon": 1e-05,
    "mlp_cfg": {"intermediate_size": 24, "bias": False, "act_fn": "silu"},
    "ssm_cfg": {
        "d_state": 6, "n_v_heads": 4, "n_qk_heads": 4, "expand": 1, "chunk_size": 128, "activation": "identity",
        "bias": False,
    },
}  # fmt: skip


def published(**changes: Any) -> dict[str, Any]:
    """A config.json; ``ssm_cfg`` and ``mlp_cfg`` are merged."""
    merged = {name: {**PUBLISHED[name], **changes.pop(name, {})} for name in ("ssm_cfg", "mlp_cfg")}
    return {**PUBLISHED, **changes, **merged}


def tensors_of(config: dict[str, Any]) -> dict[str, Tensor]:
    """Random tensors under the published names."""
    ssm, mlp, width = config["ssm_cfg"], config["mlp_cfg"], config["d_model"]
    inner, shared, n_heads = ssm["expand"] * width, ssm["n_qk_heads"] * ssm["d_state"], ssm["n_v_heads"]
    n_rows = math.ceil(config["vocab_size"] / 8) * 8
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int, std: float = 0.4, mean: float = 0.0) -> Tensor:
        return mean + std * torch.randn(*shape, generator=random)

    tensors = {
        "backbone.embedding.weight": normal(n_rows, width),
        "backbone.final_layernorm.weight": normal(width, mean=1),
    }
    if not config["tie_embeddings"]:
        tensors["lm_head.weight"] = normal(n_rows, width)
    for index in range(config["n_layer"]):
        layer = f"backbone.layers.{index}."
        linears = {
            "mixer.in_proj": (2 * inner + 2 * shared + n_heads, width),
            "mixer.out_proj": (width, inner),
            "mlp.gate_proj": (mlp["intermediate_size"], width),
            "mlp.up_proj": (mlp["intermediate_size"], width),
            "mlp.down_proj": (width, mlp["intermediate_size"]),
        }
        for name, shape in linears.items():
            tensors[f"{layer}{name}.weight"] = normal(*shape)
            if (ssm if name.startswith("mixer") else mlp)["bias"]:
                tensors[f"{layer}{name}.bias"] = normal(shape[0])
        tensors[f"{layer}mixer.conv1d.weight"] = normal(inner + 2 * shared, 1, ssm.get("d_conv", 4))
        if ssm.get("conv_bias", True):
            tensors[f"{layer}mixer.conv1d.bias"] = normal(inner + 2 * shared)
        if not ssm["bias"]:
            tensors[f"{layer}mixer.z_bias"] = normal(inner)
        tensors[f"{layer}mixer.D"] = normal(n_heads, mean=1)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{layer}{norm}.weight"] = normal(width, mean=1)
    return tensors


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], *, pickled: bool = False) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if pickled:
        torch.save(tensors, folder / "pytorch_model.bin")
    else:
        save_file(tensors, folder / "model.safetensors")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_teacher_path() / name, folder)
    return folder


class Naive:
    """The format's definition, one token and one head at a time, in float64."""

    def __init__(self, config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self.config, self.tensors = config, {name: tensor.double() for name, tensor in tensors.items()}
        self.heads: list[Tensor] = []  # of each layer, [L, H, P], as out_proj reads them

    def logits(self, ids: list[int]) -> Tensor:
        self.heads = []
        tensors = self.tensors
        hidden = [tensors["backbone.embedding.weight"][i] for i in ids]
        for index in range(self.config["n_layer"]):
            layer = f"backbone.layers.{index}."
            normed = [self._norm(h, layer + "input_layernorm") for h in hidden]
            hidden = [h + m for h, m in zip(hidden, self._mixer(f"{layer}mixer.", normed), strict=True)]
            hidden = [h + self._mlp(f"{layer}mlp.", self._norm(h, layer + "post_attention_layernorm")) for h in hidden]
        head = tensors.get("lm_head.weight", tensors["backbone.embedding.weight"])
        return torch.stack([head @ self._norm(h, "backbone.final_layernorm") for h in hidden])

    def _norm(self, h: Tensor, name: str) -> Tensor:
        return h / (h.square().mean() + 1e-5).sqrt() * self.tensors[f"{name}.weight"]

    def _linear(self, name: str, h: Tensor) -> Tensor:
        return self.tensors[f"{name}.weight"] @ h + self.tensors.get(f"{name}.bias", 0)

    def _mlp(self, name: str, h: Tensor) -> Tensor:
        gate = self._linear(name + "gate_proj", h)
        return self._linear(name + "down_proj", gate * gate.sigmoid() * self._linear(name + "up_proj", h))

    def _mixer(self, name: str, hidden: list[Tensor]) -> list[Tensor]:
        ssm = self.config["ssm_cfg"]
        n_heads, n_groups, n_states = ssm["n_v_heads"], ssm["n_qk_heads"], ssm["d_state"]
        inner = ssm["expand"] * self.config["d_model"]
        size = inner // n_heads
        in_conv = inner + 2 * n_groups * n_states
        taps, conv_bias = self.tensors[f"{name}conv1d.weight"][:, 0], self.tensors.get(f"{name}conv1d.bias", 0)
        projected = [self._linear(name + "in_proj", h) for h in hidden]
        states = torch.zeros(n_heads, size, n_states, dtype=torch.float64)
        heads, outputs = [], []
        for t, now in enumerate(projected):
            window = [projected[t - back][:in_conv] for back in range(taps.shape[1]) if back <= t]
            taken = [taps[:, -1 - back] * channels for back, channels in enumerate(window)]
            xbc = torch.stack(taken).sum(0) + conv_bias
            z = now[in_conv : in_conv + inner] + self.tensors.get(f"{name}z_bias", 0)
            y = torch.zeros(inner, dtype=torch.float64)
            for h in range(n_heads):
                group = h // (n_heads // n_groups)
                x = xbc[h * size : (h + 1) * size]
                b = xbc[inner + group * n_states :][:n_states]
                c = xbc[inner + (n_groups + group) * n_states :][:n_states]
                decay = 1 / (1 + now[in_conv + inner + h].exp())  # exp(-softplus)
                states[h] = decay * states[h] + torch.outer(x, b)
                y[h * size : (h + 1) * size] = states[h] @ c + self.tensors[f"{name}D"][h] * x
            gated = y * z * z.sigmoid()
            heads.append(gated.view(n_heads, size))
            outputs.append(self._linear(name + "out_proj", gated))
        self.heads.append(torch.stack(heads))
        return outputs


VARIANTS = {
    "published": {},
    "shared_b_and_c": {"ssm_cfg": {"n_qk_heads": 2}},
    "untied_and_wide": {"tie_embeddings": False, "ssm_cfg": {"expand": 2, "conv_bias": False, "d_conv": 3}},
    "biases": {"ssm_cfg": {"bias": True, "n_qk_heads": 1}, "mlp_cfg": {"bias": True}},
}


def make(folder: Path, **changes: Any) -> tuple[PreTrainedModel, Naive]:
    config = published(**changes)
    tensors = tensors_of(config)
    return load_llamba(write(folder, config, tensors)), Naive(config, tensors)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_computes_what_the_format_means(variant: str, tmp_path: Path) -> None:
    model, naive = make(tmp_path, **VARIANTS[variant])
    expected = naive.logits(IDS)
    with record_heads(model, 0) as first, record_heads(model, 1) as second:
        logits = model(torch.tensor([IDS])).logits[0]
    torch.testing.assert_close(logits.double(), expected, atol=1e-4, rtol=1e-4)
    for ours, theirs in zip((first[0][0], second[0][0]), naive.heads, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-4, rtol=1e-4)


def test_pickled_weights_and_other_dtypes(tmp_path: Path) -> None:
    config = published()
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(config).items()}
    model, tokenizer = load_teacher(write(tmp_path, config, tensors, pickled=True), allow_bin=True)
    assert model.dtype == torch.float32 and len(tokenizer) <= model.config.vocab_size == 2048
    half, _ = load_teacher(tmp_path, dtype="bfloat16", allow_bin=True)
    assert half.dtype == torch.bfloat16
    assert load_config(tmp_path).kept == read_teacher(tmp_path)[0].kept == [[], []]


def broken(tensors: dict[str, Tensor], fault: str) -> dict[str, Tensor]:
    in_proj = "backbone.layers.1.mixer.in_proj.weight"
    match fault:
        case "missing":
            del tensors["backbone.layers.0.mixer.D"], tensors[in_proj]
        case "unknown":
            tensors["backbone.layers.0.mixer.A_log"] = torch.ones(4)
        case "shape":
            tensors[in_proj] = tensors[in_proj][:-1].contiguous()
    return tensors


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("untied", r"missing: lm_head\.weight"),
        ("missing", r"missing: model\.layers\.0\.self_attn\.ssm\.D, model\.layers\.1\.self_attn\.ssm\.a_proj"),
        ("unknown", r"unexpected: model\.layers\.0\.self_attn\.A_log\)"),
        ("shape", r"its weights hold in_proj\.weight \(83, 16\); config\.json asks for 84 rows"),
    ],
)
def test_tensors_that_are_not_a_llambas(fault: str, message: str, tmp_path: Path) -> None:
    config = published()
    write(tmp_path, published(tie_embeddings=fault != "untied"), broken(tensors_of(config), fault))
    with pytest.raises(ValueError, match=message):
        load_teacher(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ssm_cfg": {"activation": "silu"}}, "ssm_cfg.activation 'silu'; only 'identity' is supported"),
        ({"ssm_cfg": {"n_qk_heads": 3}}, r"4 heads \(n_v_heads\) in 3 groups"),
        ({"d_model": None}, "d_model None; expected a positive whole number"),
        ({"ssm_cfg": {"d_state": 256}}, "d_state is 256; it must be a whole number from 4 to 128"),
    ],
)
def test_configs_that_would_compute_something_else(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    write(tmp_path, published(**changes), {"x": torch.zeros(1)})
    with pytest.raises(ValueError, match=message):
        load_teacher(tmp_path)


def test_without_a_tokenizer_it_says_where_to_take_one(tmp_path: Path) -> None:
    config = published()
    (write(tmp_path, config, tensors_of(config)) / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"published without its tokenizer: copy tokenizer\.json"):
        load_teacher(tmp_path)
