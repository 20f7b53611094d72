"""Alignment of each student layer with the teacher's layer."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data import Batch
from ..model.modeling_hybrid import HybridForCausalLM
from ..teacher import HeadSite, MixerCall
from .config import Align
from .losses import l2_norm_loss, normalized_mse, power
from .stage import TeacherForced, Totals, mixer_parameters, select_heads


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

    def __init__(
        self,
        student: HybridForCausalLM,
        teacher: PreTrainedModel,
        config: Align,
    ) -> None:
        super().__init__(student, teacher, config)
        if config.target == "head":
            # FSDP2 gathers a layer around one method alone, and this target never calls `forward`.
            self.entry = "heads"
        # A student's layer runs the teacher's own MLP and norms, which must then be whole.
        self.teacher_shardable = config.target != "layer"
        self.train_only(mixer_parameters(student, config.train))

    def watched(self, site: HeadSite) -> nn.Module:
        if self.config.target == "layer":
            return site.block
        return site.module

    def whole_layers(self) -> list[nn.Module]:
        """Return the layers that are compared, unless their mixers or heads are.

        Layers without a replaced head stay as they are: no hook is on them, and dynamo does not check whether one is.
        """
        if self.config.target != "layer":
            return []
        layers: list[nn.Module] = []
        for site in self._sites:
            layers += [site.block, self.student.model.layers[site.layer]]
        return layers

    def totals(self, batch: Batch) -> dict[str, Tensor]:
        """Extend `Stage.totals`; for ``nmse``, also run the teacher to get the power of each layer's target."""
        totals = super().totals(batch)
        if self.config.loss != "nmse":
            return totals

        def target_power(layer: int, call: MixerCall) -> Tensor:
            return power(self._target(layer, call), batch["mask"])

        # As in `forward`: the power must be of the target that the loss gets.
        with self.autocast(batch):
            powers = self.run_teacher(batch, target_power)
        return totals | powers

    def layer_loss(
        self,
        layer: int,
        call: MixerCall,
        batch: Batch,
        totals: Totals,
    ) -> Tensor:
        output = self._output(layer, call, batch["seq_idx"])
        target = self._target(layer, call)
        denominator = totals.get("tokens")
        if self.config.loss == "nmse":
            # `totals` stores a layer's power under the name that `run_teacher` gives its loss.
            denominator = totals.get(f"layer.{layer}")
        return self.compare(output, target, batch["mask"], denominator)

    def compare(
        self, output: Tensor, target: Tensor, mask_BL: Tensor, denominator: Tensor | None
    ) -> Tensor:
        """Compute a layer's loss; ``denominator`` is the step's tokens (``l2``) or its target's power (``nmse``)."""
        if self.config.loss == "nmse":
            return normalized_mse(output, target, mask_BL, denominator)
        return l2_norm_loss(output, target, mask_BL, denominator)

    def _target(self, layer: int, call: MixerCall) -> Tensor:
        """Return the teacher's output: [B, L, D], or [B, L, R, P] for the target ``head``."""
        if self.config.target == "head":
            return self._recurrent(layer, call.heads_BLHP)
        # Always a tuple here, whatever the module itself returned.
        return call.output[0]

    def _output(self, layer: int, call: MixerCall, seq_idx_BL: Tensor) -> Tensor:
        """Return the student's output for the input of the teacher's ``call``; shaped as `_target`."""
        mixer = self.student.mixers()[layer]
        # Attention modules do not accept seq_idx, so the call lacks it.
        arguments = {**call.kwargs, "seq_idx": seq_idx_BL}
        if self.config.target == "layer":
            output = self.student.model.layers[layer](*call.args, **arguments)
            # Some families' decoder layers return a tuple.
            if isinstance(output, tuple):
                return output[0]
            return output
        if self.config.train == "ssm" and mixer.kept:
            # Kept heads are frozen: the teacher's heads have computed their output already.
            arguments["kept_outputs"] = select_heads(call.heads_BLHP, mixer.kept, dim=2)
        if self.config.target == "head":
            heads_BLHP = mixer.heads(*call.args, **arguments)
            return self._recurrent(layer, heads_BLHP)
        return mixer(*call.args, **arguments)[0]

    def _recurrent(self, layer: int, heads_BLHP: Tensor) -> Tensor:
        """Select the heads that are recurrent in the student, [B, L, R, P]."""
        mixer = self.student.mixers()[layer]
        return select_heads(heads_BLHP, mixer.replaced, dim=2)
