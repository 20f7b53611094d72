"""Base class of the models with a hybrid decoder: loading, mixers and caches."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn

import torch
from torch import nn
from transformers import PreTrainedModel, __version__

from .backbone import make_backbone
from .cache import HybridCache
from .configuration_hybrid import HybridConfig
from .decoder import make_cache, put_mixers
from .kernel_choice import check_implementation
from .layout import attention_name, decoder_of, rope_frequencies
from .mixer import HeadPart, HybridMixer
from .recurrent_heads import SSMHeads
from .self_check import check_new_version

LOCATION_OPTIONS = ("cache_dir", "local_files_only", "revision", "subfolder", "token")
"""Options of `from_pretrained` that say where a checkpoint is."""


class HybridPreTrainedModel(PreTrainedModel):
    """Base of the models with a hybrid decoder, ``model``: the backbone's decoder with a `HybridMixer` in each layer.

    The mixer replaces the attention module of the layer (``self_attn`` in most families).
    """

    config_class = HybridConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _own_tensors: ClassVar[tuple[str, ...]] = ()
    """Tensors that a student's checkpoint lacks: they are drawn."""

    model: Any

    def __init__(self, config: HybridConfig) -> None:
        # Read first: transformers puts its own choice in the place of None.
        requested = config._attn_implementation or config.checked_attention
        requested_experts = config._experts_implementation
        config._experts_implementation = None
        super().__init__(config)
        backbone = make_backbone(config.shared_backbone(), requested)
        # transformers looks for experts in the source of a class; here they are the backbone's.
        self.__dict__["_can_set_experts_implementation"] = backbone._can_set_experts_implementation
        if requested_experts is not None:
            backbone.set_experts_implementation(requested_experts)
        config.share_backbone(decoder_of(backbone).config)
        config._attn_implementation = backbone.config._attn_implementation
        config._experts_implementation = backbone.config._experts_implementation
        self.model = decoder_of(backbone)
        self._no_split_modules = backbone._no_split_modules
        put_mixers(self.model, config)
        self._add_head(config, backbone)
        self.post_init()
        # post_init uses the backbone's initialization, which skips these.
        for heads in self.recurrent_heads():
            heads.reset_parameters(config.initializer_range)

    def _add_head(self, config: HybridConfig, backbone: PreTrainedModel) -> None:
        """Add the modules that read the last hidden states; a decoder alone has none."""

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """Load as transformers does, but raise ValueError for missing or unexpected tensors.

        Under a version of transformers that is not in the export's record, the model checks itself on a few tokens and
        raises ValueError if it computes something else padded, packed or from a cache (`check_same_logits`). With
        ``output_loading_info=True``, return the names of missing and unexpected tensors instead of raising.
        """
        loaded: Any = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        if output_loading_info:
            return loaded
        model, info = loaded
        path = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        missing = sorted(name for name in info["missing_keys"] if name not in cls._own_tensors)
        unexpected = sorted(info["unexpected_keys"])
        if missing or unexpected:
            unties = missing == ["lm_head.weight"] and _stores_tied(path, kwargs)
            _refuse_tensors(path or "this checkpoint", missing, unexpected, unties)
        check_new_version(model, path)
        return model

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move or cast as `nn.Module` does, but leave RoPE's frequencies as exact as they are.

        ``.to(torch.bfloat16)`` would round them, which turns positions by half a radian after 500 tokens;
        ``from_pretrained`` does not.
        """
        exact = rope_frequencies(self)
        super()._apply(fn, recurse)
        for name, rounded in rope_frequencies(self).items():
            if rounded.dtype.itemsize < exact[name].dtype.itemsize:
                module, _, attribute = name.rpartition(".")
                setattr(self.get_submodule(module), attribute, exact[name].to(rounded.device))
        return self

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    def mixers(self) -> list[HybridMixer]:
        """Return the mixers, one per layer."""
        return [getattr(layer, attention_name(layer)) for layer in self.model.layers]

    def mixers_with(self, part: HeadPart) -> list[HybridMixer]:
        """Return the mixers whose replaced heads have this part."""
        if part == "recurrence":
            return [mixer for mixer in self.mixers() if mixer.ssm is not None]
        return [mixer for mixer in self.mixers() if mixer.windowed is not None]

    def recurrent_heads(self) -> list[SSMHeads]:
        """Return the recurrent heads of every layer that has any, and the copies that adapters train."""
        # Not mixer.ssm: PEFT puts a wrapper there (`modules_to_save`), from which attributes can be read, but a
        # written one stays on the wrapper.
        return [module for module in self.model.modules() if isinstance(module, SSMHeads)]

    def first_recurrent_heads(self) -> SSMHeads | None:
        """Return the first of `recurrent_heads`, to read the settings that all of them share; None without any."""
        return next(iter(self.recurrent_heads()), None)

    def get_input_embeddings(self) -> nn.Module:
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.model.set_input_embeddings(value)

    def set_segment_len(self, segment_len: int | None) -> None:
        """Set how many tokens recurrent heads process per segment (`SSMHeads`); None processes a whole row at once."""
        for heads in self.recurrent_heads():
            heads.segment_len = segment_len

    def set_ssm_implementation(self, impl: str) -> None:
        """Select one of `kernel_choice.IMPLEMENTATIONS` for recurrent heads. Raises as `check_implementation`."""
        check_implementation(impl)
        for heads in self.recurrent_heads():
            heads.impl = impl

    @property
    def ssm_implementation(self) -> str:
        """Implementation of recurrent heads that `set_ssm_implementation` selected; ``auto`` without such heads."""
        heads = self.first_recurrent_heads()
        if heads is None:
            return "auto"
        return heads.impl

    def new_cache(
        self, kv_dtype: torch.dtype | None = None, max_length: int | None = None
    ) -> HybridCache:
        """Make an empty cache for this model.

        Keys and values are stored in ``kv_dtype`` (`KV_DTYPES`), by default in their own dtype; recurrent states in
        float32. ``max_length`` makes a cache for at most that many tokens, with static addresses (`StaticLayerCache`).
        """
        return make_cache(self.model.config, kv_dtype, max_length)


def _stores_tied(path: Any, options: dict[str, Any]) -> bool:
    """Return True if a checkpoint's own config ties the embeddings.

    The options of `from_pretrained` do not say who untied them: `AutoModelForCausalLM` has put them into the config.
    """
    if path is None:
        return False
    location = {name: options[name] for name in LOCATION_OPTIONS if name in options}
    return bool(HybridConfig.from_pretrained(path, **location).tie_word_embeddings)


def _refuse_tensors(
    where: str, missing: list[str], unexpected: list[str], unties: bool
) -> NoReturn:
    """Raise ValueError for a checkpoint whose tensors are not the model's."""
    if unties:
        raise ValueError(
            f"{where} stores one tensor for both embeddings; leave tie_word_embeddings=False out."
        )
    differences = []
    for kind, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            differences.append(f"{kind}: {', '.join(names[:3])}")
    raise ValueError(
        f"the tensors of {where} do not match this model under transformers {__version__} "
        f"({'; '.join(differences)}); copy the whole folder again, or export the student again."
    )
