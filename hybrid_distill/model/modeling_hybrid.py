"""Student models: a transformers decoder with a `HybridMixer` in place of each attention module.

Shapes: B batch, L length, S source length, D model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
from transformers.utils.generic import can_return_tuple

# Keep every import: transformers up to 5.8 loads only those files of an export that this file imports directly.
from .aligned_rows import join_aligned
from .backbone import longrope_switch
from .backbone_config import MODEL_TYPE
from .cache import HybridCache
from .chunked_scan import scan_chunked
from .configuration_hybrid import HybridConfig
from .convolution import causal_conv
from .decays import log_decay
from .decoder import put_mixers
from .document_kernels import flash_runs
from .document_mask import DocumentMask
from .documents import packed_inputs
from .field_rules import release
from .gated_delta import delta_scan
from .generation import OUTPUT_CACHE, HybridGeneration
from .kernel_choice import check_implementation
from .layer_cache import HybridLayerCache
from .layout import cache_of
from .local_attention import attend_locally
from .logits import finish_logits
from .mixer import HybridMixer
from .once import once
from .prefill import HybridPrefill
from .prefix import Prefix
from .pretrained import HybridPreTrainedModel
from .prompt import Prompt
from .recurrences import FORMS
from .recurrent_heads import SSMHeads
from .ring import TokenRing
from .rows import TokensFirst
from .self_check import check_new_version
from .ssd import ssd_scan
from .static_layer_cache import StaticLayerCache
from .weight_samples import sample_weights
from .window_kernels import window_blocks
from .windowed_heads import WindowedAttention
from .windows import layer_windows


class HybridModel(HybridPreTrainedModel):
    """Hybrid decoder alone, for `AutoModel`: computes hidden states, and loads checkpoints of `HybridForCausalLM`."""

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\.", r"^score\."]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: HybridCache | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast:
        """Run the decoder. The arguments are those of `HybridForCausalLM.forward`, without ``labels``."""
        return self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            cache=cache,
            **kwargs,
        )


class HybridForSequenceClassification(GenericForSequenceClassification, HybridPreTrainedModel):
    """Hybrid decoder with a linear classifier of each row's last token: classifiers and reward models.

    Loads checkpoints of `HybridForCausalLM`; the classifier is then drawn, and has to be trained.
    """

    _keys_to_ignore_on_load_unexpected = [r"^lm_head\."]
    _own_tensors = ("score.weight",)
    # The mixin takes `num_items_in_batch` and does not divide by it: Trainer must divide by the accumulated
    # micro-batches (transformers issue 47688).
    accepts_loss_kwargs = False

    def __init__(self, config: HybridConfig) -> None:
        # Not super(): the mixin would make another decoder, by AutoModel.
        HybridPreTrainedModel.__init__(self, config)

    def _add_head(self, config: HybridConfig, backbone: PreTrainedModel) -> None:
        self.num_labels: Any = config.num_labels
        self.score = nn.Linear(config.hidden_size, self.num_labels, bias=False)


class HybridForCausalLM(HybridGeneration):
    """Causal language model that keeps some attention heads and replaces the others by recurrent heads.

    ``model`` and ``lm_head`` are the backbone's. In each of ``model.layers``, a `HybridMixer` replaces the attention
    module.
    """

    def _add_head(self, config: HybridConfig, backbone: PreTrainedModel) -> None:
        self.lm_head: Any = backbone.get_output_embeddings()
        embedding = self.model.get_input_embeddings()
        # Families name it differently: embed_tokens, or embed_in in GPT-NeoX.
        name = next(name for name, module in self.model.named_modules() if module is embedding)
        self._tied_weights_keys = {"lm_head.weight": f"model.{name}.weight"}
        self._longrope_switch = longrope_switch(backbone)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> Any:
        """Save as transformers does, but store both embeddings if the config unties them and the model shares them."""
        tied = self.all_tied_weights_keys
        if self.config.tie_word_embeddings or not tied:
            return super().save_pretrained(*args, **kwargs)
        state = kwargs.get("state_dict") or self.state_dict()
        # A copy: of tensors that share memory, transformers stores one.
        kwargs["state_dict"] = {**state, "lm_head.weight": state["lm_head.weight"].clone()}
        self.all_tied_weights_keys = {}
        try:
            return super().save_pretrained(*args, **kwargs)
        finally:
            # This model goes on sharing them, and may be saved again.
            self.all_tied_weights_keys = tied

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: HybridCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        seq_idx: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        past_key_values: HybridCache | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Compute next-token logits.

        ``attention_mask`` [B, S] is 0 at padding. A 4-D mask may only be causal, unless the row's documents are given
        too: replaced heads do not read it. ``seq_idx`` [B, L] numbers the documents packed in a row, ascending:
        positions restart and nothing leaks from one document to the next. The conventions of transformers also work:
        ``position_ids`` that restart within a row, or ``cu_seq_lens_q``, the document boundaries in all rows
        concatenated. ``use_cache`` defaults to True, except in training and with packed documents.
        ``past_key_values`` is what transformers before 5.24 calls the ``cache``. Raises ValueError for a cache of
        another class, a cache with packed documents, or a 4-D mask that hides tokens. Maps (``output_attentions``) are
        [B, heads, L, S] of the heads that attend, kept ones first.
        """
        if cache is None:
            cache = past_key_values
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            seq_idx=seq_idx,
            return_dict=True,
            **kwargs,
        )
        places = logits_to_keep
        if isinstance(places, int):
            # 0 keeps all, because -0 is where a slice begins.
            places = slice(-places, None)
        hidden_BLD = outputs[0][:, places, :]
        logits = finish_logits(self.lm_head(hidden_BLD), self.model.config)
        loss = None
        if labels is not None:
            loss = self.loss_function(
                logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs
            )
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{OUTPUT_CACHE: cache_of(outputs)},
        )


# transformers knows by these tables what a class is for, under an export's own code too: for others, Trainer compares
# smoothed labels with the token before (`label_smoothing_factor`), and pipelines log that they are not supported.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[MODEL_TYPE] = HybridForCausalLM.__name__
MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[MODEL_TYPE] = (
    HybridForSequenceClassification.__name__
)
