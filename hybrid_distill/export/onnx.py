"""Export of a student as an ONNX graph, which ONNX Runtime runs on a CPU without this package.

The same graph reads a prompt and then, from the states it returned, one token after another. Operators are standard
(opset 24) except three of ONNX Runtime's own: ``LinearAttention``, whose gated rule with q = C, k = B, v = x and g =
log a is the discrete head; ``CausalConvWithState``; and ``LinearAttentionGate``, which computes log a. Opset 27 has the
first two, but ONNX Runtime 1.32 has no kernels for them and runs them as loops over the tokens. Each layer stores only
what its own heads need. `obstacles` lists what cannot be exported.

Shapes: B batch, L length, S tokens so far (past and input), R recurrent heads, P head dim, N state size, C conv
channels, K conv width, G stored KV heads.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from ..model import HybridForCausalLM
from ..model.mixer import HybridMixer, SSMHeads
from .falcon_h1 import backbone_obstacles, kept_by_group, placed, rope_kinds

if TYPE_CHECKING:
    from onnx_ir import Model, Value

BACKBONES = ("llama", "mistral", "qwen2", "qwen3")
MODEL, DATA, RUNNER = "model.onnx", "model.onnx.data", "generate.py"
OPSET, RUNTIME_DOMAIN = 24, "com.microsoft"
LARGEST_FILE = 2**31 - 2**24  # bytes of weights in model.onnx itself: protobuf allows 2 GiB, including the graph
_END = 2**62  # end of a slice up to the last token
_ROPE_BY_LENGTH = {"dynamic", "longrope"}  # frequencies depend on the length of the text


def obstacles(student: HybridForCausalLM) -> list[str]:
    """List the reasons why a student cannot be written as ONNX."""
    found = backbone_obstacles(student, BACKBONES)
    if student.config.recurrence == "gdn":
        found.append("its recurrent heads are gdn")
    if kinds := rope_kinds(student) & _ROPE_BY_LENGTH:
        found.append(f"its RoPE is {', '.join(sorted(kinds))}: its frequencies change with the length of the text")
    return found


@torch.no_grad()
def write(student: HybridForCausalLM, tokenizer: PreTrainedTokenizerBase | None, folder: Path) -> None:
    """Write generate.py and a float32 model.onnx, with its weights in model.onnx.data if one file cannot hold them."""
    import onnx_ir

    model = _Writer(student).model()
    ends = student.generation_config.eos_token_id if student.generation_config else student.config.eos_token_id
    ends = [] if ends is None else [ends] if isinstance(ends, int) else ends
    model.metadata_props["eos_token_id"] = json.dumps(ends)
    n_bytes = sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)
    onnx_ir.save(model, folder / MODEL, external_data=DATA if n_bytes > LARGEST_FILE else None)
    shutil.copyfile(Path(__file__).with_name("onnx_generate.py"), folder / RUNNER)


class _Writer:
    """Builder of a student's graph, node by node in the order of its forward pass."""

    def __init__(self, student: HybridForCausalLM) -> None:
        import onnx_ir as ir
        from onnxscript import GraphBuilder

        self.ir, self.student, self.head_dim = ir, student, student.config.head_dim
        domains = {"": OPSET, RUNTIME_DOMAIN: 1}
        self.graph = ir.Graph([], [], nodes=[], opset_imports=domains, name="student")
        self.builder = GraphBuilder(self.graph)
        self.op, self.own = self.builder.op, self.builder.opset(RUNTIME_DOMAIN, 1)
        self.states: list[tuple[Value, str]] = []

    def model(self) -> Model:
        """Build the model: token ids, mask and states in; logits and states out."""
        op, integer = self.op, self.ir.DataType.INT64
        ids_BL = self.builder.input("input_ids", integer, ["batch", "length"])
        mask_BS = self.builder.input("attention_mask", integer, ["batch", "total_length"])
        keep = self.builder.input("logits_to_keep", const_value=self.ir.tensor([0], integer))
        self._positions(ids_BL, mask_BS)
        decoder = self.student.model
        embedding = self._weight("embed_tokens", decoder.embed_tokens.weight)
        hidden = op.Gather(embedding, ids_BL)
        for number, layer in enumerate(decoder.layers):
            self.builder.push_module(f"layers.{number}")
            normed = self._norm("mixer_norm", hidden, layer.input_layernorm)
            hidden = op.Add(hidden, self._mixer(normed, layer.self_attn))
            normed = self._norm("mlp_norm", hidden, layer.post_attention_layernorm)
            hidden = op.Add(hidden, self._mlp(normed, layer.mlp))
            self.builder.pop_module()
        hidden = op.Slice(hidden, op.Neg(keep), [_END], [1])  # 0 keeps all, as in transformers
        hidden = self._norm("norm", hidden, decoder.norm)
        if self.student.lm_head.weight is decoder.embed_tokens.weight:
            logits = op.MatMul(hidden, op.Transpose(embedding, perm=[1, 0]))
        else:
            logits = self._linear("lm_head", hidden, self.student.lm_head)
        self._output(logits, "logits", ["batch", "kept_length", self.student.config.vocab_size])
        for value, name in self.states:
            self._output(value, name, [])
        return self.ir.Model(self.graph, ir_version=11, producer_name="hybrid-distill")

    def _positions(self, ids_BL: Value, mask_BS: Value) -> None:
        """Build what all layers share: the token mask, RoPE's angles and the attention mask.

        Padding attends to itself, because a softmax over nothing is NaN, which would spread.
        """
        op, ir = self.op, self.ir
        length, total = op.Shape(ids_BL, start=1), op.Shape(mask_BS, start=1)
        first = op.Neg(length)
        token_BL = op.Slice(mask_BS, first, [_END], [1])
        self.token_BL1 = op.Unsqueeze(op.Cast(token_BL, to=ir.DataType.FLOAT), [-1])
        position_BS = op.Max(op.Sub(op.CumSum(mask_BS, 1), 1), 0)
        position_BL1 = op.Unsqueeze(op.Slice(position_BS, first, [_END], [1]), [-1])
        rope = self.student.model.rotary_emb
        angle = op.Mul(op.Cast(position_BL1, to=ir.DataType.FLOAT), self._weight("inv_freq", rope.inv_freq))
        self.cos, self.sin = (
            op.Mul(turned, float(rope.attention_scaling)) for turned in (op.Cos(angle), op.Sin(angle))
        )
        place_1S = op.Unsqueeze(op.Range(0, op.Squeeze(total), 1), [0])
        place_L1 = op.Transpose(op.Slice(place_1S, first, [_END], [1]), perm=[1, 0])
        earlier_BLS = op.And(op.Less(place_1S, place_L1), op.Unsqueeze(op.Cast(mask_BS, to=ir.DataType.BOOL), [1]))
        self.seen_B1LS = op.Unsqueeze(op.Or(earlier_BLS, op.Equal(place_1S, place_L1)), [1])

    def _mixer(self, hidden: Value, mixer: HybridMixer) -> Value:
        """Write a layer's heads and their output projection, its columns reordered to match the heads.

        Each KV head serves the same number of query heads: uneven groups are padded with zeros, which are never read.
        """
        ssm, attention, head_dim = mixer.ssm, mixer.attention, self.head_dim
        parts: dict[str, tuple[Tensor, Tensor | None]] = {}  # weight and bias of each part of one product
        if ssm is not None:
            shifted = [ssm.x_proj, ssm.b_proj, ssm.c_proj]
            bias = None if ssm.form.has_silu else torch.cat([projection.bias for projection in shifted])
            parts["xbc"] = torch.cat([projection.weight for projection in shifted]), bias
            parts["z"] = ssm.z_proj.weight, ssm.z_proj.bias
            parts["a"] = ssm.a_proj.weight, None
        groups = kept_by_group(mixer)
        shared = max(map(len, groups), default=0)
        queries = [place for heads in groups for place in [*heads, *[None] * (shared - len(heads))]]
        for part, places in (("q", queries), ("k", range(len(groups))), ("v", range(len(groups)))):
            if attention is not None:
                projection = getattr(attention, f"{part}_proj")
                bias = None if projection.bias is None else placed(projection.bias, places, head_dim)
                parts[part] = placed(projection.weight, places, head_dim), bias
        made = self._split("in_proj", hidden, parts)
        written = [] if ssm is None else [self._recurrent(ssm, mixer.layer, made)]
        if attention is not None:
            written.append(self._attention(attention, mixer.layer, made, len(queries), len(groups)))
        heads = [*mixer.recurrent, *[None if place is None else mixer.kept[place] for place in queries]]
        weight = placed(mixer.o_proj.weight.T, heads, head_dim).T
        joined = written[0] if len(written) == 1 else self.op.Concat(*written, axis=-1)
        return self._affine("out_proj", joined, weight, mixer.o_proj.bias)

    def _recurrent(self, heads: SSMHeads, layer: int, made: dict[str, Value]) -> Value:
        """Write `SSMHeads.forward`: convolution, recurrence, skip and gate."""
        op, n_heads, d_state, head_dim = self.op, heads.n_heads, heads.d_state, heads.head_dim
        n_channels, width = heads.conv_weight.shape
        bias = heads.conv_bias
        past = self._state(layer, "conv_state", ["batch", width - 1, n_channels])
        xbc, conv_state = self.own.CausalConvWithState(
            op.Mul(made["xbc"], self.token_BL1),
            self._weight("conv.weight", heads.conv_weight.unsqueeze(1)),
            None if bias is None else self._weight("conv.bias", bias),
            past,
            channels_last=1,
            activation="silu" if heads.form.has_silu else "none",
            _outputs=2,
        )
        x, b, c = op.Split(xbc, heads.sizes, axis=-1, _outputs=3)
        if bias is not None:
            x = op.Mul(x, self.token_BL1)  # the bias made padding nonzero
        log_a = self.own.LinearAttentionGate(
            made["a"], self._weight("a_proj.bias", heads.a_proj.bias), self._weight("minus_one", -torch.ones(n_heads))
        )
        if heads.form.has_silu:
            dt_BLR1 = op.Unsqueeze(op.Neg(log_a), [-1])
            b_BLRN = op.Mul(op.Reshape(b, [0, 0, n_heads, d_state]), dt_BLR1)
            b = op.Reshape(b_BLRN, [0, 0, n_heads * d_state])
        past = self._state(layer, "recurrent_state", ["batch", n_heads, d_state, head_dim])
        options = {"q_num_heads": n_heads, "kv_num_heads": n_heads, "scale": 1.0, "update_rule": "gated"}
        y, state = self.own.LinearAttention(c, b, x, past, log_a, **options, _outputs=2)
        self.states += [(conv_state, f"present.{layer}.conv_state"), (state, f"present.{layer}.recurrent_state")]
        skip = op.Mul(x, self._weight("D", heads.D.repeat_interleave(head_dim)))
        return op.Mul(op.Add(y, skip), self._silu(made["z"]))

    def _attention(self, attention: Any, layer: int, made: dict[str, Value], n_heads: int, n_stored: int) -> Value:
        """Write a layer's kept heads."""
        op, head_dim = self.op, self.head_dim
        turned = []
        for part, count in (("q", n_heads), ("k", n_stored)):
            value = made[part]
            if (norm := getattr(attention, f"{part}_norm", None)) is not None:
                split = op.Reshape(value, [0, 0, count, head_dim])
                value = op.Reshape(self._norm(f"{part}_norm", split, norm), [0, 0, count * head_dim])
            turned.append(op.RotaryEmbedding(value, self.cos, self.sin, num_heads=count))
        shape = ["batch", n_stored, "past_length", head_dim]
        past = [self._state(layer, name, shape) for name in ("key", "value")]
        options = {"q_num_heads": n_heads, "kv_num_heads": n_stored, "scale": float(attention.scaling)}
        y, key, value = op.Attention(*turned, made["v"], self.seen_B1LS, *past, **options, _outputs=3)
        self.states += [(key, f"present.{layer}.key"), (value, f"present.{layer}.value")]
        return y

    def _mlp(self, hidden: Value, mlp: Any) -> Value:
        gate, up = (self._linear(name, hidden, getattr(mlp, name)) for name in ("gate_proj", "up_proj"))
        return self._linear("down_proj", self.op.Mul(self._silu(gate), up), mlp.down_proj)

    def _silu(self, value: Value) -> Value:
        return self.op.Mul(value, self.op.Sigmoid(value))  # ONNX Runtime has no kernel for Swish

    def _norm(self, name: str, hidden: Value, norm: Any) -> Value:
        return self.op.RMSNormalization(hidden, self._weight(name, norm.weight), epsilon=norm.variance_epsilon)

    def _split(self, name: str, hidden: Value, parts: dict[str, tuple[Tensor, Tensor | None]]) -> dict[str, Value]:
        """Write several projections as one matrix product, and split the result."""
        weights = [weight for weight, _ in parts.values()]
        biases = [weight.new_zeros(len(weight)) if bias is None else bias for weight, bias in parts.values()]
        product = self._affine(name, hidden, torch.cat(weights), torch.cat(biases))
        made = self.op.Split(product, [len(weight) for weight in weights], axis=-1, _outputs=len(parts))
        return dict(zip(parts, made, strict=True))

    def _linear(self, name: str, hidden: Value, linear: nn.Linear) -> Value:
        return self._affine(name, hidden, linear.weight, linear.bias)

    def _affine(self, name: str, hidden: Value, weight: Tensor, bias: Tensor | None) -> Value:
        product = self.op.MatMul(hidden, self._weight(f"{name}.weight", weight.T))
        return product if bias is None else self.op.Add(product, self._weight(f"{name}.bias", bias))

    def _weight(self, name: str, tensor: Tensor) -> Value:
        values = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
        return self.builder.initializer(self.ir.tensor(values), name)

    def _state(self, layer: int, name: str, shape: list[int | str]) -> Value:
        return self.builder.input(f"past_key_values.{layer}.{name}", self.ir.DataType.FLOAT, shape)

    def _output(self, value: Value, name: str, shape: list[int | str]) -> None:
        value.dtype = self.ir.DataType.FLOAT
        if shape:
            value.shape = self.ir.Shape(shape)
        self.builder.add_output(value, name)
