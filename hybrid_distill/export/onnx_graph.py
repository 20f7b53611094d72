"""Build a student's ONNX graph, node by node in the order of its forward pass.

Operators are standard (opset 24) except three of ONNX Runtime's own: ``LinearAttention``, whose
gated rule with q = C, k = B, v = x and g = log a is the discrete head; ``CausalConvWithState``; and
``LinearAttentionGate``, which computes log a. Opset 27 has the first two, but ONNX Runtime 1.32 has
no kernels for them and runs them as loops over the tokens. `onnx_windows` holds the windows.

Shapes: B batch, L length, S tokens so far (past and input), R recurrent heads, P head dim, N state
size, C conv channels, K conv width, G stored KV heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..model import HybridForCausalLM
from ..model.mixer import HybridMixer
from ..model.recurrent_heads import SSMHeads
from .head_blocks import gather_blocks, padded
from .onnx_windows import END, WindowGraph

if TYPE_CHECKING:
    from onnx_ir import Model, Value

OPSET = 24
RUNTIME_DOMAIN = "com.microsoft"


class GroupedHeads(NamedTuple):
    """Heads of one attention operator, which wants as many query heads for each KV head."""

    queries: list[int | None]
    """Query heads by KV head; None pads a KV head with fewer query heads than another."""
    groups: list[int]
    """KV heads, each stored once."""

    @classmethod
    def of(cls, heads: Sequence[int], group_size: int) -> GroupedHeads:
        """Group query heads by the KV head that they read."""
        queries_of: dict[int, list[int]] = {}
        for head in heads:
            queries_of.setdefault(head // group_size, []).append(head)
        largest = max(map(len, queries_of.values()), default=0)
        queries: list[int | None] = []
        for own in queries_of.values():
            queries += padded(own, largest)
        return cls(queries, list(queries_of))


class Projection(NamedTuple):
    """Linear layer that shares a matrix product with others (`GraphBuilder._split`)."""

    weight: Tensor
    bias: Tensor | None


class GraphBuilder:
    """Student's graph under construction: inputs, nodes and states, and the values that layers share."""

    def __init__(self, student: HybridForCausalLM) -> None:
        import onnx_ir as ir
        import onnxscript

        self.ir = ir
        self.student = student
        self.head_dim = student.config.head_dim
        domains = {"": OPSET, RUNTIME_DOMAIN: 1}
        self.graph = ir.Graph([], [], nodes=[], opset_imports=domains, name="student")
        self.builder = onnxscript.GraphBuilder(self.graph)
        self.op = self.builder.op
        self.runtime_op = self.builder.opset(RUNTIME_DOMAIN, 1)
        self.states: dict[str, Value] = {}
        """States after the input, by output name."""

    def build(self) -> Model:
        """Build the model: token ids, mask and states in; logits and states out."""
        op = self.op
        integer = self.ir.DataType.INT64
        ids_BL = self.builder.input("input_ids", integer, ["batch", "length"])
        mask_BS = self.builder.input("attention_mask", integer, ["batch", "total_length"])
        all_tokens = self.ir.tensor([0], integer)
        n_kept = self.builder.input("logits_to_keep", const_value=all_tokens)
        self._build_shared_values(ids_BL, mask_BS)
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
        # From -n_kept on: 0 keeps all tokens, as in transformers.
        first_kept = op.Neg(n_kept)
        hidden = op.Slice(hidden, first_kept, [END], [1])
        hidden = self._norm("norm", hidden, decoder.norm)
        if self.student.lm_head.weight is decoder.embed_tokens.weight:
            # Tied: the weight is stored once.
            transposed = op.Transpose(embedding, perm=[1, 0])
            logits = op.MatMul(hidden, transposed)
        else:
            logits = self._linear("lm_head", hidden, self.student.lm_head)
        logits.shape = self.ir.Shape(["batch", "kept_length", self.student.config.vocab_size])
        self._add_output("logits", logits)
        for name, state in self.states.items():
            self._add_output(name, state)
        return self.ir.Model(self.graph, ir_version=11, producer_name="hybrid-distill")

    def _add_output(self, name: str, value: Value) -> None:
        value.dtype = self.ir.DataType.FLOAT
        self.builder.add_output(value, name)

    def _build_shared_values(self, ids_BL: Value, mask_BS: Value) -> None:
        """Build the values that all layers read: token mask, windows, RoPE's angles, attention mask."""
        op = self.op
        length = op.Shape(ids_BL, start=1)
        total = op.Shape(mask_BS, start=1)
        # The mask also covers the past: the input's tokens are its last ones.
        first = op.Neg(length)
        token_BL = op.Slice(mask_BS, first, [END], [1])
        is_token_BL = op.Cast(token_BL, to=self.ir.DataType.FLOAT)
        self.token_BL1 = op.Unsqueeze(is_token_BL, [-1])

        n_tokens_BS = op.CumSum(mask_BS, 1)
        position_BS = op.Sub(n_tokens_BS, 1)
        # Padding on the left counts as position 0.
        position_BS = op.Max(position_BS, 0)
        position_BL = op.Slice(position_BS, first, [END], [1])
        config = self.student.config
        if config.window:
            self.windows = WindowGraph(op, config.window, config.sinks)
            self.window_values = self.windows.build(mask_BS, token_BL, position_BL)
        self._build_rotations(position_BL)
        self._build_attention_mask(mask_BS, first, total)

    def _build_rotations(self, position_BL: Value) -> None:
        """Build the cosines and sines of RoPE, [B, L, P / 2]."""
        op = self.op
        position_BL1 = op.Unsqueeze(position_BL, [-1])
        rope = self.student.model.rotary_emb
        inv_freq = self._weight("inv_freq", rope.inv_freq)
        position_BL1 = op.Cast(position_BL1, to=self.ir.DataType.FLOAT)
        angle = op.Mul(position_BL1, inv_freq)
        # YaRN scales queries and keys, by way of the sines and cosines.
        scaling = float(rope.attention_scaling)
        cosine = op.Cos(angle)
        sine = op.Sin(angle)
        self.cos = op.Mul(cosine, scaling)
        self.sin = op.Mul(sine, scaling)

    def _build_attention_mask(self, mask_BS: Value, first: Value, total: Value) -> None:
        """Build the causal mask: padding is masked, and attends only to itself."""
        op = self.op
        column_S = op.Range(0, op.Squeeze(total), 1)
        column_1S = op.Unsqueeze(column_S, [0])
        column_1L = op.Slice(column_1S, first, [END], [1])
        column_L1 = op.Transpose(column_1L, perm=[1, 0])
        is_past_LS = op.Less(column_1S, column_L1)
        is_token_BS = op.Cast(mask_BS, to=self.ir.DataType.BOOL)
        is_token_B1S = op.Unsqueeze(is_token_BS, [1])
        is_past_token_BLS = op.And(is_past_LS, is_token_B1S)
        # Itself, even for padding: a softmax over nothing is NaN, which would spread.
        is_own_LS = op.Equal(column_1S, column_L1)
        attends_BLS = op.Or(is_past_token_BLS, is_own_LS)
        self.attends_B1LS = op.Unsqueeze(attends_BLS, [1])

    def _mixer(self, hidden: Value, mixer: HybridMixer) -> Value:
        """Write a layer's heads and their output projection, its columns reordered to match.

        A replaced head that sums a window and a recurrence has its columns twice.
        """
        kept = GroupedHeads.of(mixer.kept, mixer.group_size)
        windowed = GroupedHeads.of(mixer.replaced if mixer.windowed else (), mixer.group_size)
        projections: dict[str, Projection] = {}
        if mixer.ssm is not None:
            projections |= self._recurrent_projections(mixer.ssm)
        if kept.queries:
            projections |= self._attention_projections(mixer, "", kept)
        if windowed.queries:
            projections |= self._attention_projections(mixer, "window_", windowed)
        projected = self._split("in_proj", hidden, projections)

        outputs = []
        # The heads of each block of the outputs, in the same order.
        columns: list[int | None] = []
        if mixer.ssm is not None:
            outputs.append(self._recurrent(mixer.ssm, mixer.layer, projected))
            columns += mixer.replaced
        if windowed.queries:
            # A module of its own: kept heads have norms of the same names.
            self.builder.push_module("windows")
            outputs.append(self._windowed(mixer.attention, mixer.layer, projected, windowed))
            self.builder.pop_module()
            columns += windowed.queries
        if kept.queries:
            outputs.append(self._attention(mixer.attention, mixer.layer, projected, kept))
            columns += kept.queries
        joined = outputs[0]
        if len(outputs) > 1:
            joined = self.op.Concat(*outputs, axis=-1)
        weight = gather_blocks(mixer.o_proj.weight.T, columns, self.head_dim).T
        return self._affine("out_proj", joined, weight, mixer.o_proj.bias)

    def _attention_projections(
        self, mixer: HybridMixer, prefix: str, heads: GroupedHeads
    ) -> dict[str, Projection]:
        """Return the projections of attention heads: queries, keys and values."""
        queries, groups = heads
        if mixer.windowed is None:
            # The module holds the kept heads alone, and is indexed by their order.
            queries = [None if head is None else mixer.kept.index(head) for head in queries]
            groups = list(range(len(groups)))
        projections = {}
        for part, positions in (("q", queries), ("k", groups), ("v", groups)):
            projection = getattr(mixer.attention, f"{part}_proj")
            bias = projection.bias
            if bias is not None:
                bias = gather_blocks(bias, positions, self.head_dim)
            weight = gather_blocks(projection.weight, positions, self.head_dim)
            projections[prefix + part] = Projection(weight, bias)
        return projections

    def _recurrent_projections(self, heads: SSMHeads) -> dict[str, Projection]:
        """Return the projections of the recurrent heads: input of the convolution, gate and decay."""
        convolved = [heads.x_proj, heads.b_proj, heads.c_proj]
        bias = None
        if not heads.form.has_silu:
            bias = torch.cat([projection.bias for projection in convolved])
        weight = torch.cat([projection.weight for projection in convolved])
        return {
            "xbc": Projection(weight, bias),
            "z": Projection(heads.z_proj.weight, heads.z_proj.bias),
            # LinearAttentionGate adds the bias.
            "a": Projection(heads.a_proj.weight, None),
        }

    def _recurrent(self, heads: SSMHeads, layer: int, projected: dict[str, Value]) -> Value:
        """Write `SSMHeads.forward`: convolution, recurrence, skip and gate."""
        op = self.op
        n_heads = heads.n_heads
        xbc = self._convolution(heads, layer, projected["xbc"])
        x, b, c = op.Split(xbc, heads.sizes, axis=-1, _outputs=3)
        if heads.conv_bias is not None:
            # The bias made padding nonzero, which would enter the state.
            x = op.Mul(x, self.token_BL1)
        # log a = -softplus(a + bias): the operator multiplies by its third input.
        log_a_BLR = self.runtime_op.LinearAttentionGate(
            projected["a"],
            self._weight("a_proj.bias", heads.a_proj.bias),
            self._weight("minus_one", -torch.ones(n_heads)),
        )
        if heads.form.has_silu:
            # Mamba-2 scales B by the step size, from which the decay is computed; A = -1.
            step_BLR = op.Neg(log_a_BLR)
            step_BLR1 = op.Unsqueeze(step_BLR, [-1])
            b_BLRN = op.Reshape(b, [0, 0, n_heads, heads.d_state])
            b_BLRN = op.Mul(b_BLRN, step_BLR1)
            b = op.Reshape(b_BLRN, [0, 0, n_heads * heads.d_state])
        shape = ["batch", n_heads, heads.d_state, heads.head_dim]
        past = self._state(layer, "recurrent_state", shape)
        y, recurrent_state = self.runtime_op.LinearAttention(
            c,
            b,
            x,
            past,
            log_a_BLR,
            q_num_heads=n_heads,
            kv_num_heads=n_heads,
            scale=1.0,
            update_rule="gated",
            _outputs=2,
        )
        self.states[f"present.{layer}.recurrent_state"] = recurrent_state
        d = self._weight("D", heads.D.repeat_interleave(heads.head_dim))
        skip = op.Mul(x, d)
        y = op.Add(y, skip)
        return op.Mul(y, self._silu(projected["z"]))

    def _convolution(self, heads: SSMHeads, layer: int, xbc: Value) -> Value:
        """Write the causal convolution of x, B and C, with the form's bias and SiLU."""
        n_channels, width = heads.conv_weight.shape
        past = self._state(layer, "conv_state", ["batch", width - 1, n_channels])
        masked = self.op.Mul(xbc, self.token_BL1)
        weight = self._weight("conv.weight", heads.conv_weight.unsqueeze(1))
        bias = None
        if heads.conv_bias is not None:
            bias = self._weight("conv.bias", heads.conv_bias)
        convolved, conv_state = self.runtime_op.CausalConvWithState(
            masked,
            weight,
            bias,
            past,
            channels_last=1,
            activation="silu" if heads.form.has_silu else "none",
            _outputs=2,
        )
        self.states[f"present.{layer}.conv_state"] = conv_state
        return convolved

    def _attention(
        self, attention: Any, layer: int, projected: dict[str, Value], heads: GroupedHeads
    ) -> Value:
        """Write the attention of a layer's kept heads, up to the output projection."""
        n_stored = len(heads.groups)
        shape = ["batch", n_stored, "past_length", self.head_dim]
        query = self._rotated(attention, "q", projected["q"], len(heads.queries))
        key = self._rotated(attention, "k", projected["k"], n_stored)
        past_key = self._state(layer, "key", shape)
        past_value = self._state(layer, "value", shape)
        y, key, value = self.op.Attention(
            query,
            key,
            projected["v"],
            self.attends_B1LS,
            past_key,
            past_value,
            q_num_heads=len(heads.queries),
            kv_num_heads=n_stored,
            scale=float(attention.scaling),
            _outputs=3,
        )
        self.states[f"present.{layer}.key"] = key
        self.states[f"present.{layer}.value"] = value
        return y

    def _windowed(
        self, attention: Any, layer: int, projected: dict[str, Value], heads: GroupedHeads
    ) -> Value:
        """Write the attention of a layer's windowed heads, up to the output projection."""
        n_groups = len(heads.groups)
        shape = ["batch", self.windows.n_stored, n_groups * self.head_dim]
        query = self._rotated(attention, "q", projected["window_q"], len(heads.queries))
        new_key = self._rotated(attention, "k", projected["window_k"], n_groups)
        past_key = self._state(layer, "window_key", shape)
        next_BR1 = self.window_values.next_BR1
        key, stored_key = self.windows.extend(past_key, new_key, next_BR1)
        past_value = self._state(layer, "window_value", shape)
        value, stored_value = self.windows.extend(past_value, projected["window_v"], next_BR1)
        self.states[f"present.{layer}.window_key"] = stored_key
        self.states[f"present.{layer}.window_value"] = stored_value
        return self.op.Attention(
            query,
            key,
            value,
            self.window_values.attends_B1LT,
            q_num_heads=len(heads.queries),
            kv_num_heads=n_groups,
            scale=float(attention.scaling),
        )

    def _rotated(self, attention: Any, part: str, heads: Value, n_heads: int) -> Value:
        """Apply the family's head norm to queries or keys, if it has one, and RoPE."""
        norm = getattr(attention, f"{part}_norm", None)
        if norm is not None:
            split = self.op.Reshape(heads, [0, 0, n_heads, self.head_dim])
            normed = self._norm(f"{part}_norm", split, norm)
            heads = self.op.Reshape(normed, [0, 0, n_heads * self.head_dim])
        return self.op.RotaryEmbedding(heads, self.cos, self.sin, num_heads=n_heads)

    def _mlp(self, hidden: Value, mlp: Any) -> Value:
        gate = self._linear("gate_proj", hidden, mlp.gate_proj)
        up = self._linear("up_proj", hidden, mlp.up_proj)
        gated = self.op.Mul(self._silu(gate), up)
        return self._linear("down_proj", gated, mlp.down_proj)

    def _silu(self, value: Value) -> Value:
        # ONNX Runtime has no kernel for Swish.
        return self.op.Mul(value, self.op.Sigmoid(value))

    def _norm(self, name: str, hidden: Value, norm: Any) -> Value:
        weight = self._weight(name, norm.weight)
        return self.op.RMSNormalization(hidden, weight, epsilon=norm.variance_epsilon)

    def _split(
        self, name: str, hidden: Value, projections: dict[str, Projection]
    ) -> dict[str, Value]:
        """Write several projections as one matrix product, and split the result by name."""
        weights = []
        biases = []
        for weight, bias in projections.values():
            if bias is None:
                bias = weight.new_zeros(len(weight))
            weights.append(weight)
            biases.append(bias)
        product = self._affine(name, hidden, torch.cat(weights), torch.cat(biases))
        sizes = [len(weight) for weight in weights]
        outputs = self.op.Split(product, sizes, axis=-1, _outputs=len(projections))
        return dict(zip(projections, outputs, strict=True))

    def _linear(self, name: str, hidden: Value, linear: nn.Linear) -> Value:
        return self._affine(name, hidden, linear.weight, linear.bias)

    def _affine(self, name: str, hidden: Value, weight: Tensor, bias: Tensor | None) -> Value:
        transposed = self._weight(f"{name}.weight", weight.T)
        product = self.op.MatMul(hidden, transposed)
        if bias is None:
            return product
        return self.op.Add(product, self._weight(f"{name}.bias", bias))

    def _weight(self, name: str, tensor: Tensor) -> Value:
        """Store a tensor in the graph, in float32."""
        on_host = tensor.detach().to("cpu", torch.float32)
        values = on_host.contiguous().numpy()
        return self.builder.initializer(self.ir.tensor(values), name)

    def _state(self, layer: int, name: str, shape: list[int | str]) -> Value:
        """Add an input for a layer's state before the tokens."""
        full_name = f"past_key_values.{layer}.{name}"
        return self.builder.input(full_name, self.ir.DataType.FLOAT, shape)
