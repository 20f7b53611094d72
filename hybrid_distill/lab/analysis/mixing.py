"""Run a model on one prompt to read its heads' matrices (`head_matrices`), or with masked matrices.

Shapes: T target token, S source token, D model width, H head, P head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...plan import HeadId
from ...probes.answering import forward
from ...scoring.head_scores import heads_of
from ...teacher import (
    HeadKind,
    HeadSite,
    check_exists,
    eager_attention,
    eval_mode,
    head_sites,
    longest_context,
)
from .head_matrices import Call, Calls, HeadMix, Mixer, read_mixes

T = TypeVar("T")

MAX_GB = 4.0
BYTES_PER_KEPT_ENTRY = 4
BYTES_PER_MIXING_ENTRY = 28
"""Bytes of a mixing matrix during its computation: decays in float64, products in float32."""


def mix_heads(
    model: PreTrainedModel,
    ids: Sequence[int],
    heads: Sequence[HeadId],
    read: Callable[[HeadMix], T] = lambda mix: mix,
    *,
    kind: HeadKind | None = None,
    max_gb: float = MAX_GB,
) -> list[T]:
    """Return ``read`` of each head's `HeadMix` on one prompt (by default the `HeadMix` itself),
    from one forward.

    Matrices are made one at a time. ``kind`` as in `head_sites`. Raises ValueError for a head or
    kind that the model does not have, and as `check_prompt` does.
    """
    check_prompt(model, ids, heads, kind, max_gb)
    results: dict[HeadId, T] = {}

    def read_all(site: HeadSite, mixes: Iterator[HeadMix], calls: Calls) -> None:
        for mix in mixes:
            results[mix.head] = read(mix)

    ids_1L = torch.tensor([ids], device=model.device)
    with eval_mode(model), _after_mixers(model, heads, kind, read_all):
        forward(model, ids_1L, torch.ones_like(ids_1L), logits_to_keep=1)
    return [results[head] for head in heads]


AfterForward = Callable[[HeadSite, Iterator[HeadMix], Calls], object]
"""Callback after a mixer's forward, given the matrices of its heads."""


@contextmanager
def mask_heads(
    model: PreTrainedModel, masks: Mapping[HeadId, Tensor], *, kind: HeadKind | None = None
) -> Iterator[None]:
    """Make each named head mix by ``matrix * mask``, with boolean masks [T, S]. ``kind`` as in
    `head_sites`.

    Rows are not renormalized; a row whose mask keeps everything stays identical to the last bit. An
    SSM's gate and norm stay those of the whole head. Attention runs eagerly, because no other
    implementation returns its maps. Raises ValueError for a head that does not exist, and for
    forwards of anything but one prompt of T tokens without a cache.
    """

    _check_single_matrix(model, masks, kind)

    def project_masked(site: HeadSite, mixes: Iterator[HeadMix], calls: Calls) -> object:
        heads_BTHP = calls[site.o_proj].hidden.unflatten(-1, (-1, site.head_dim)).clone()
        for mix in mixes:
            mask_TS = masks[mix.head].to(mix.matrix_TS.device)
            if len(heads_BTHP) != 1 or mask_TS.shape != mix.matrix_TS.shape:
                raise ValueError(
                    f"the mask of {mix.head} is {tuple(mask_TS.shape)}, the forward has "
                    f"{len(heads_BTHP)} rows of {heads_BTHP.shape[1]} tokens; run one prompt of "
                    "as many tokens as its mask has, without a cache."
                )
            own_TP = heads_BTHP[0, :, mix.head.head]
            masked = replace(mix, matrix_TS=mix.matrix_TS * mask_TS)
            masked_TP = masked.output().to(own_TP.dtype)
            # The product rounds differently than the model does: whole rows stay the model's own.
            future_TS = ~torch.ones_like(mask_TS).tril()
            whole_T1 = (mask_TS | future_TS).all(-1, keepdim=True)
            heads_BTHP[0, :, mix.head.head] = torch.where(whole_T1, own_TP, masked_TP)
        # By its forward, not its call: the hooks of o_proj have run in this forward already.
        out_BTD = site.o_proj.forward(heads_BTHP.flatten(-2))
        output = calls[site.module].output
        return (out_BTD, *output[1:]) if isinstance(output, tuple) else out_BTD

    with _after_mixers(model, list(masks), kind, project_masked):
        yield


def _check_single_matrix(
    model: PreTrainedModel, heads: Iterable[HeadId], kind: HeadKind | None
) -> None:
    """Raise ValueError for a head with a window and a recurrence: its matrix covers only the recurrence, so a mask
    would miss the window."""
    site_of = find_heads(model, kind)
    for head in heads:
        site = site_of.get(head)
        if site is None or site.kind != "hybrid" or site.kind_of(head.head) == "attention":
            continue
        mixer: Any = site.module
        if mixer.windowed is not None:
            raise ValueError(
                f"{head} sums a window and a recurrence, and only one matrix can be masked; pass kept "
                "heads, or a student without windows."
            )


@contextmanager
def _after_mixers(
    model: PreTrainedModel,
    heads: Sequence[HeadId],
    kind: HeadKind | None,
    after_forward: AfterForward,
) -> Iterator[None]:
    """Call ``after_forward`` after each mixer that has some of the heads.

    Its result, if any, replaces the mixer's output.
    """
    kinds = {site.kind_of(head.head) for head, site in find_heads(model, kind).items()}
    with ExitStack() as hooks:
        if "attention" in kinds:
            hooks.enter_context(eager_attention(model))
        for site in sites_of(model, heads, kind):
            in_layer = [head for head in heads if head.layer == site.layer]
            hooks.enter_context(_after_mixer(site, in_layer, after_forward))
        yield


@contextmanager
def _after_mixer(
    site: HeadSite, heads: list[HeadId], after_forward: AfterForward
) -> Iterator[None]:
    calls: Calls = {}
    # Hooks of the mixer, only while its block runs: layers may share a mixer.
    inner = ExitStack()

    def record(
        module: nn.Module,
        args: tuple[Tensor, ...],
        kwargs: dict[str, Tensor],
        output: Mixer,
    ) -> None:
        hidden = args[0] if args else kwargs.get("hidden_states")
        calls[module] = Call(hidden, output)

    def enter(*_: object) -> None:
        # Prepended: outputs are recorded before any other hook replaces them.
        for module in site.module.modules():
            inner.enter_context(
                module.register_forward_hook(record, with_kwargs=True, prepend=True)
            )

    def after(*_: object) -> object:
        if not calls:  # it runs for another layer
            return None
        return after_forward(site, read_mixes(site, heads, calls), calls)

    def leave(*_: object) -> None:
        inner.close()
        calls.clear()

    with (
        site.block.register_forward_pre_hook(enter),
        site.module.register_forward_hook(after),
        # Also after an error: no hook may stay behind.
        site.block.register_forward_hook(leave, always_call=True),
    ):
        yield


def find_heads(model: PreTrainedModel, kind: HeadKind | None = None) -> dict[HeadId, HeadSite]:
    """Find all heads of a kind, as `head_sites` does.

    In a student those that are kept, or recurrent.
    """
    # A student's sites hold heads of both kinds; head_sites of a kind would refuse it.
    sites = head_sites(model)
    if sites[0].kind != "hybrid":
        sites = head_sites(model, kind)
    site_of: dict[HeadId, HeadSite] = {}
    for site in sites:
        for head in heads_of([site]):
            if kind in (None, site.kind_of(head.head)):
                site_of[head] = site
    if not site_of:
        raise ValueError(f"this student has no heads of kind {kind!r}; leave out --kind.")
    return site_of


def sites_of(
    model: PreTrainedModel, heads: Sequence[HeadId], kind: HeadKind | None = None
) -> list[HeadSite]:
    """Return the layers of some heads.

    Raises ValueError for a head that does not exist, or is of another kind.
    """
    site_of = find_heads(model, kind)
    by_layer = {site.layer: site for site in site_of.values()}
    for head in heads:
        if head not in site_of:
            check_exists(model, list(by_layer.values()), head)
            raise ValueError(
                f"{head} of this student is of another kind than {kind!r}; leave out --kind."
            )
    layers = dict.fromkeys(head.layer for head in heads)
    return [by_layer[layer] for layer in layers]


def check_prompt(
    model: PreTrainedModel,
    ids: Sequence[int],
    heads: Sequence[HeadId],
    kind: HeadKind | None,
    max_gb: float,
) -> None:
    """Raise ValueError for a prompt that is empty or too long, or whose matrices are too large."""
    context = longest_context(model.config)
    if not ids or (context is not None and len(ids) > context):
        limit = "at least 1 token"
        if context is not None:
            limit = f"1 to {context} tokens, the model's context"
        raise ValueError(f"the prompt has {len(ids)} tokens; it must have {limit}.")
    # One matrix at a time is computed, in addition to those that are kept.
    sites = sites_of(model, heads, kind)
    largest = max((_bytes_in_computation(site) for site in sites), default=0)
    bytes_per_entry = BYTES_PER_KEPT_ENTRY * len(heads) + largest
    needed = len(ids) ** 2 * bytes_per_entry / 2**30
    if needed > max_gb:
        raise ValueError(
            f"the matrices of {len(heads)} heads on {len(ids)} tokens take about {needed:.1f} "
            f"GiB, more than the {max_gb:.1f} GiB allowed; take a shorter prompt or fewer heads, "
            "or allow more with --max-gb."
        )


def _bytes_in_computation(site: HeadSite) -> int:
    """Return the bytes per entry of a matrix during its computation."""
    mixer: Mixer = site.module
    # Every state of a Mamba-1 channel has its own matrix.
    n_matrices = mixer.A_log.shape[-1] if site.kind == "channel" else 1
    # Eager attention computes the maps of all heads at once: scores and softmax in float32.
    map_bytes = 0
    if site.kind in ("attention", "hybrid"):
        map_bytes = 8 * site.n_heads
    return max(BYTES_PER_MIXING_ENTRY * n_matrices, map_bytes)
