"""Alignment of mixing matrices with attention maps."""

from __future__ import annotations

from torch import Tensor, nn
from transformers import PreTrainedModel

from ..data import Batch
from ..model.modeling_hybrid import HybridForCausalLM
from ..teacher import HeadSite, MixerCall
from .config import AlignMatrix
from .losses import frobenius_loss
from .stage import TeacherForced, Totals, mixer_parameters, n_rows, select_heads

UNUSED = ("x_proj", "z_proj")
"""Parameters of recurrent heads that do not affect mixing matrices."""


class MatrixAlignment(TeacherForced[AlignMatrix]):
    """Alignment of the recurrent heads' mixing matrices with the teacher's attention maps (arXiv 2408.10189).

    The loss is the sum over layers of the mean over rows and heads of the Frobenius norm. Trains only the parameters
    behind the matrices: B, C, the decay, their convolution and D. Raises ValueError unless the teacher runs eager
    attention, the only one that returns its maps.
    """

    # `mixing_matrices` is not `forward`, around which sharded weights are gathered.
    shardable = False

    def __init__(
        self,
        student: HybridForCausalLM,
        teacher: PreTrainedModel,
        config: AlignMatrix,
    ) -> None:
        implementation = teacher.config._attn_implementation
        if implementation != "eager":
            raise ValueError(
                f"the matrix stage needs attention maps, which {implementation!r} attention does not return; "
                "load the teacher with --teacher.attn-implementation eager."
            )
        if student.config.window:
            raise ValueError(
                f"the matrix stage compares whole attention maps with mixing matrices, and student.window is "
                f"{student.config.window}: heads with a window sum both. Pass --student.window 0, or align with "
                "Align() instead."
            )
        super().__init__(student, teacher, config)
        parameters = mixer_parameters(student, "ssm")
        chosen = {name: p for name, p in parameters.items() if not _is_unused(name)}
        self.train_only(chosen)

    def watched(self, site: HeadSite) -> nn.Module:
        return site.module

    def totals(self, batch: Batch) -> dict[str, Tensor]:
        """Extend `Stage.totals` by the number of rows."""
        return super().totals(batch) | {"rows": n_rows(batch["mask"])}

    def layer_loss(
        self,
        layer: int,
        call: MixerCall,
        batch: Batch,
        totals: Totals,
    ) -> Tensor:
        mixer = self.student.mixers()[layer]
        mixing_BRLS = mixer.mixing_matrices(call.hidden_BLD, batch["seq_idx"])
        # Eager attention returns (output, maps).
        maps_BHLS = call.output[1]
        maps_BRLS = select_heads(maps_BHLS, mixer.replaced, dim=1)
        n_rows_of_step = totals.get("rows")
        return frobenius_loss(mixing_BRLS, maps_BRLS, batch["mask"], n_rows_of_step)


def _is_unused(name: str) -> bool:
    return any(part in name for part in UNUSED)
