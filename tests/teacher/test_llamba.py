"""Llamba checkpoints in their published format, against the format's definition written out.

Shapes: L length, H heads, P head dim.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from messages import naming
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_distill.assets import tiny_teacher_path
from hybrid_distill.teacher import load_config, load_teacher, read_teacher, record_heads
from hybrid_distill.teacher.llamba import load_llamba

Config = dict[str, Any]
IDS = [5, 90, 17, 17, 3, 44, 8, 61, 2, 30, 30]
PUBLISHED: Config = {
    "model_type": "llamba",
    # The embedding has 2048 rows, as many as the embedded teacher's tokenizer has tokens.
    "vocab_size": 2045,
    "tie_embeddings": True,
    "pad_vocab_size_multiple": 8,
    "lm_head_bias": False,
    "d_model": 16,
    "n_layer": 2,
    "resid_dropout": 0.0,
    "norm_epsilon": 1e-05,
    "mlp_cfg": {"intermediate_size": 24, "bias": False, "act_fn": "silu"},
    "ssm_cfg": {
        "d_state": 6,
        "n_v_heads": 4,
        "n_qk_heads": 4,
        "expand": 1,
        "chunk_size": 128,
        "activation": "identity",
        "bias": False,
    },
}
VARIANTS: dict[str, Config] = {
    "published": {},
    "shared_b_and_c": {"ssm_cfg": {"n_qk_heads": 2}},
    "untied_and_wide": {
        "tie_embeddings": False,
        "ssm_cfg": {"expand": 2, "conv_bias": False, "d_conv": 3},
    },
    "biases": {"ssm_cfg": {"bias": True, "n_qk_heads": 1}, "mlp_cfg": {"bias": True}},
}


def published(**changes: Any) -> Config:
    """Make a config.json; ``ssm_cfg`` and ``mlp_cfg`` are merged."""
    config = PUBLISHED | changes
    for section in ("ssm_cfg", "mlp_cfg"):
        config[section] = PUBLISHED[section] | changes.get(section, {})
    return config


def tensors_of(config: Config) -> dict[str, Tensor]:
    """Draw tensors under the published names."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int, mean: float = 0.0) -> Tensor:
        return mean + 0.4 * torch.randn(*shape, generator=generator)

    width = config["d_model"]
    n_rows = math.ceil(config["vocab_size"] / 8) * 8
    tensors = {
        "backbone.embedding.weight": normal(n_rows, width),
        "backbone.final_layernorm.weight": normal(width, mean=1),
    }
    if not config["tie_embeddings"]:
        tensors["lm_head.weight"] = normal(n_rows, width)
    for index in range(config["n_layer"]):
        for name, tensor in layer_tensors(config, normal).items():
            tensors[f"backbone.layers.{index}.{name}"] = tensor
    return tensors


def layer_tensors(config: Config, normal: Any) -> dict[str, Tensor]:
    ssm = config["ssm_cfg"]
    mlp = config["mlp_cfg"]
    width = config["d_model"]
    hidden = mlp["intermediate_size"]
    inner = ssm["expand"] * width
    n_channels = inner + 2 * ssm["n_qk_heads"] * ssm["d_state"]
    n_heads = ssm["n_v_heads"]
    linears = {
        "mixer.in_proj": (inner + n_channels + n_heads, width),
        "mixer.out_proj": (width, inner),
        "mlp.gate_proj": (hidden, width),
        "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
    }
    tensors = {}
    for name, shape in linears.items():
        section = ssm if name.startswith("mixer") else mlp
        tensors[f"{name}.weight"] = normal(*shape)
        if section["bias"]:
            tensors[f"{name}.bias"] = normal(shape[0])
    tensors["mixer.conv1d.weight"] = normal(n_channels, 1, ssm.get("d_conv", 4))
    if ssm.get("conv_bias", True):
        tensors["mixer.conv1d.bias"] = normal(n_channels)
    if not ssm["bias"]:
        tensors["mixer.z_bias"] = normal(inner)
    tensors["mixer.D"] = normal(n_heads, mean=1)
    tensors["input_layernorm.weight"] = normal(width, mean=1)
    tensors["post_attention_layernorm.weight"] = normal(width, mean=1)
    return tensors


def write(
    folder: Path, config: Config, tensors: dict[str, Tensor], *, pickled: bool = False
) -> Path:
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

    def __init__(self, config: Config, tensors: dict[str, Tensor]) -> None:
        self.config = config
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self.heads: list[Tensor] = []
        """By layer, [L, H, P], as out_proj reads them."""

    def logits(self, ids: list[int]) -> Tensor:
        self.heads = []
        embedding = self.tensors["backbone.embedding.weight"]
        hidden = list(embedding[ids])
        for index in range(self.config["n_layer"]):
            layer = f"backbone.layers.{index}."
            normed = [self._norm(h, f"{layer}input_layernorm") for h in hidden]
            mixed = self._mixer(f"{layer}mixer.", normed)
            for t, mixed_t in enumerate(mixed):
                h = hidden[t] + mixed_t
                normed_t = self._norm(h, f"{layer}post_attention_layernorm")
                hidden[t] = h + self._mlp(f"{layer}mlp.", normed_t)
        head = self.tensors.get("lm_head.weight", embedding)
        logits = [head @ self._norm(h, "backbone.final_layernorm") for h in hidden]
        return torch.stack(logits)

    def _norm(self, h: Tensor, name: str) -> Tensor:
        return h / (h.square().mean() + 1e-5).sqrt() * self.tensors[f"{name}.weight"]

    def _linear(self, name: str, h: Tensor) -> Tensor:
        return self.tensors[f"{name}.weight"] @ h + self.tensors.get(f"{name}.bias", 0)

    def _mlp(self, name: str, h: Tensor) -> Tensor:
        gate = self._linear(f"{name}gate_proj", h)
        up = self._linear(f"{name}up_proj", h)
        return self._linear(f"{name}down_proj", silu(gate) * up)

    def _mixer(self, name: str, hidden: list[Tensor]) -> list[Tensor]:
        ssm = self.config["ssm_cfg"]
        n_heads = ssm["n_v_heads"]
        n_groups = ssm["n_qk_heads"]
        n_states = ssm["d_state"]
        inner = ssm["expand"] * self.config["d_model"]
        size = inner // n_heads
        n_keys = n_groups * n_states
        n_channels = inner + 2 * n_keys
        D = self.tensors[f"{name}D"]
        z_bias = self.tensors.get(f"{name}z_bias", 0)
        projected = [self._linear(f"{name}in_proj", h) for h in hidden]
        states = torch.zeros(n_heads, size, n_states, dtype=torch.float64)
        heads = []
        outputs = []
        for t, projected_t in enumerate(projected):
            _, z, a = projected_t.split([n_channels, inner, n_heads])
            channels = self._convolved(name, projected[: t + 1], n_channels)
            x, b, c = channels.split([inner, n_keys, n_keys])
            x = x.view(n_heads, size)
            b = b.view(n_groups, n_states)
            c = c.view(n_groups, n_states)
            y = torch.zeros(n_heads, size, dtype=torch.float64)
            for h in range(n_heads):
                group = h // (n_heads // n_groups)
                decay = 1 / (1 + a[h].exp())  # exp(-softplus)
                states[h] = decay * states[h] + torch.outer(x[h], b[group])
                y[h] = states[h] @ c[group] + D[h] * x[h]
            gated = y * silu(z + z_bias).view(n_heads, size)
            heads.append(gated)
            outputs.append(self._linear(f"{name}out_proj", gated.flatten()))
        self.heads.append(torch.stack(heads))
        return outputs

    def _convolved(self, name: str, projected: list[Tensor], n_channels: int) -> Tensor:
        """Convolve x, B and C at the last token; the last tap sees that token."""
        taps = self.tensors[f"{name}conv1d.weight"][:, 0]
        total = torch.zeros(n_channels, dtype=torch.float64)
        total += self.tensors.get(f"{name}conv1d.bias", 0)
        for back in range(min(taps.shape[1], len(projected))):
            total += taps[:, -1 - back] * projected[-1 - back][:n_channels]
        return total


def silu(x: Tensor) -> Tensor:
    return x * x.sigmoid()


def make(folder: Path, **changes: Any) -> tuple[PreTrainedModel, Naive]:
    config = published(**changes)
    tensors = tensors_of(config)
    write(folder, config, tensors)
    return load_llamba(folder), Naive(config, tensors)


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
def test_it_computes_what_the_format_means(variant: str, tmp_path: Path) -> None:
    model, naive = make(tmp_path, **VARIANTS[variant])
    expected = naive.logits(IDS)
    with record_heads(model, 0) as of_layer_0, record_heads(model, 1) as of_layer_1:
        logits = model(torch.tensor([IDS])).logits[0]

    close = {"atol": 1e-4, "rtol": 1e-4}
    torch.testing.assert_close(logits.double(), expected, **close)
    for recorded, heads in zip((of_layer_0, of_layer_1), naive.heads, strict=True):
        (heads_BLHP,) = recorded
        torch.testing.assert_close(heads_BLHP[0].double(), heads, **close)


def test_pickled_weights_and_other_dtypes(tmp_path: Path) -> None:
    config = published()
    tensors = {name: tensor.bfloat16() for name, tensor in tensors_of(config).items()}
    write(tmp_path, config, tensors, pickled=True)
    model, tokenizer = load_teacher(tmp_path, allow_bin=True)
    assert model.dtype == torch.float32
    assert len(tokenizer) <= model.config.vocab_size == 2048
    half, _ = load_teacher(tmp_path, dtype="bfloat16", allow_bin=True)
    assert half.dtype == torch.bfloat16


def test_its_config_is_that_of_a_student_that_keeps_nothing(tmp_path: Path) -> None:
    config = published()
    # Neither asks for the weights.
    write(tmp_path, config, tensors_of(config), pickled=True)
    nothing = [[], []]
    assert load_config(tmp_path).kept == nothing
    assert read_teacher(tmp_path)[0].kept == nothing


IN_PROJ = "backbone.layers.1.mixer.in_proj.weight"


def without_tensors(tensors: dict[str, Tensor]) -> None:
    del tensors["backbone.layers.0.mixer.D"]
    del tensors[IN_PROJ]


def with_a_tensor(tensors: dict[str, Tensor]) -> None:
    tensors["backbone.layers.0.mixer.A_log"] = torch.ones(4)


def without_a_row(tensors: dict[str, Tensor]) -> None:
    tensors[IN_PROJ] = tensors[IN_PROJ][:-1].contiguous()


@pytest.mark.parametrize(
    ("damage", "names"),
    [
        (
            without_tensors,
            ["model.layers.0.self_attn.ssm.D", "model.layers.1.self_attn.ssm.a_proj"],
        ),
        (with_a_tensor, ["model.layers.0.self_attn.A_log"]),
        (without_a_row, ["in_proj.weight", "(83, 16)", "84"]),
    ],
)
def test_missing_unknown_and_misshapen_tensors_are_refused(
    damage: Any, names: list[str], tmp_path: Path
) -> None:
    config = published()
    tensors = tensors_of(config)
    damage(tensors)
    write(tmp_path, config, tensors)
    with pytest.raises(ValueError, match=naming(*names)):
        load_teacher(tmp_path)


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"tie_embeddings": False}, ["lm_head.weight"]),
        ({"ssm_cfg": {"activation": "silu"}}, ["ssm_cfg.activation", "'silu'"]),
        ({"ssm_cfg": {"n_qk_heads": 3}}, [3, "n_qk_heads"]),
        ({"d_model": None}, ["d_model", None]),
        ({"ssm_cfg": {"d_state": 256}}, ["d_state", 256]),
    ],
)
def test_configs_that_would_compute_something_else_are_refused(
    changes: Config, facts: list, tmp_path: Path
) -> None:
    write(tmp_path, published(**changes), tensors_of(published()))
    with pytest.raises(ValueError, match=naming(*facts)):
        load_teacher(tmp_path)


def test_without_a_tokenizer_the_file_is_named(tmp_path: Path) -> None:
    config = published()
    write(tmp_path, config, tensors_of(config))
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=naming("tokenizer.json")):
        load_teacher(tmp_path)
