"""Hybrid model. The other files of this folder are the remote code of exported checkpoints."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from .cache import HybridCache
from .configuration_hybrid import HybridConfig
from .convolution import causal_conv
from .decays import log_decay
from .documents import packed_inputs
from .layer_cache import HybridLayerCache
from .mixer import HybridMixer
from .modeling_hybrid import HybridForCausalLM, HybridForSequenceClassification, HybridModel
from .recurrent_heads import SSMHeads
from .ssd import mixing_matrix, ssd_scan, ssd_step
from .windows import layer_windows

__all__ = [
    "HybridCache", "HybridConfig", "HybridForCausalLM", "HybridForSequenceClassification", "HybridLayerCache",
    "HybridMixer", "HybridModel", "SSMHeads", "causal_conv", "layer_windows", "log_decay", "mixing_matrix",
    "packed_inputs", "ssd_scan", "ssd_step",
]  # fmt: skip

# Local checkpoints then load without trust_remote_code, and save_pretrained copies the code next to the weights.
AutoConfig.register(HybridConfig.model_type, HybridConfig)
AutoModel.register(HybridConfig, HybridModel)
AutoModelForCausalLM.register(HybridConfig, HybridForCausalLM)
AutoModelForSequenceClassification.register(HybridConfig, HybridForSequenceClassification)
HybridConfig.register_for_auto_class()
HybridModel.register_for_auto_class("AutoModel")
HybridForCausalLM.register_for_auto_class("AutoModelForCausalLM")
HybridForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
