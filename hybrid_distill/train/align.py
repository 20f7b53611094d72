"""Alignment of each student layer with the teacher's layer."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data import Batch
from ..model.modeling_hybrid import HybridForCausalLM
from ..teacher import AttentionSite, MixerCall
from .config import Align
from .losses import l2_norm_loss, normalized_mse, power
from .stage import TeacherForced, Totals, mixer_parameters, pick_heads


class LayerAlignment(TeacherForced[Align]):
    """Layer-to-layer alignment: each student layer must match the teacher's layer on the same input (arXiv 2408.10189).

    Hooks on the modules capture the ``target`` to compare, because the last of the ``hidden_states`` that transformers
    returns has been through the final norm:

    * ``mixer``: output of the attention module, after the output projection;
    * ``layer``: output of the decoder layer, including MLP and residual;
    * ``head``: output of each recurrent head before the projection, so that heads can be swapped one by one.

    The total is the sum of ``loss`` over layers. If ``train`` is ``ssm``, a kept head contributes exactly what the
    teacher's head does.
    """

    def __init__(self, student: HybridForCausalLM, teacher: PreTrainedModel, config: Align) -> None:
        super().__init__(student, teacher, config)
        self.entry = "heads" if config.target == "head" else "forward"
        self.teacher_shardable = config.target != "layer"
        self.train_only(mixer_parameters(student, config.train))

    def watched(self, site: AttentionSite) -> nn.Module:
        return site.block if self.config.target == "layer" else site.module

    def totals(self, batch: Batch) -> dict[str, Tensor]:
        """Extend `Stage.totals`; for ``nmse``, also run the teacher to get the power of each layer's target."""
        totals = super().totals(batch)
        if self.config.loss == "nmse":
            with self.autocast(batch):
                totals |= self.run_teacher(batch, lambda *of_layer: power(self._target(*of_layer), batch["mask"]))
        return totals

    def layer_loss(self, layer: int, call: MixerCall, batch: Batch, totals: Totals) -> Tensor:
        output, target = self._output(layer, call, batch["seq_idx"]), self._target(layer, call)
        if self.config.loss == "nmse":
            return normalized_mse(output, target, batch["mask"], totals.get(f"layer.{layer}"))
        return l2_norm_loss(output, target, batch["mask"], totals.get("tokens"))

    def _target(self, layer: int, call: MixerCall) -> Tensor:
        return self._recurrent(layer, call.heads_BLHP) if self.config.target == "head" else call.output[0]

    def _output(self, layer: int, call: MixerCall, seq_idx_BL: Tensor) -> Tensor:
        mixer, arguments = self.student.mixers()[layer], {**call.kwargs, "seq_idx": seq_idx_BL}
        if self.config.target == "layer":
            output = self.student.model.layers[layer](*call.args, **arguments)
            return output[0] if isinstance(output, tuple) else output
        if self.config.train == "ssm" and mixer.kept:  # frozen: same output as the teacher's heads
            arguments["attended"] = pick_heads(call.heads_BLHP, mixer.kept, dim=2)
        if self.config.target == "head":
            return self._recurrent(layer, mixer.heads(*call.args, **arguments))
        return mixer(*call.args, **arguments)[0]

    def _recurrent(self, layer: int, heads_BLHP: Tensor) -> Tensor:
        return pick_heads(heads_BLHP, self.student.mixers()[layer].recurrent, dim=2)
