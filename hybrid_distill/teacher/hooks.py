"""Record, ablate and replay the outputs of a decoder's heads and layers.

Shapes: B batch, L length, H head, P head dim, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..io import Record
from ..plan import HeadId
from .sites import HeadKind, HeadSite, attention_sites, check_exists, decoder_blocks, head_sites


@contextmanager
def ablate_heads(model: nn.Module, heads: Iterable[HeadId], *, kind: HeadKind | None = None) -> Iterator[None]:
    """Ablate heads while the context is open: zero their slices of the output projection's input.

    ``kind`` is as in `head_sites`. The model is restored afterwards, also after an exception; contexts may be nested.
    Raises ValueError for a head that does not exist, and for a forward that bypasses the projection.
    """
    sites = head_sites(model, kind)
    heads_of: dict[int, list[int]] = {}
    for head_id in (HeadId(*head) for head in heads):
        check_exists(model, sites, head_id)
        heads_of.setdefault(head_id.layer, []).append(head_id.head)

    def zero(which: list[int], heads_BLHP: Tensor) -> None:
        heads_BLHP[..., which, :] = 0

    with ExitStack() as hooks:
        for site in sites:
            if which := heads_of.get(site.layer):
                hooks.enter_context(_edited_heads(site, partial(zero, which)))
        yield


@contextmanager
def ablate_heads_by_row(
    model: nn.Module, layer: int, heads: Sequence[int], *, kind: HeadKind | None = None
) -> Iterator[None]:
    """Ablate a different head of one layer in each group of rows: ``len(heads)`` ablations in one batch.

    With G = ``len(heads)``, rows g*B/G to (g+1)*B/G - 1 of a batch of B rows lose head ``heads[g]``. Raises ValueError
    as `ablate_heads` does.
    """

    def edit(heads_BLHP: Tensor) -> None:
        heads_GRLHP = heads_BLHP.unflatten(0, (len(heads), -1))
        heads_GRLHP[list(range(len(heads))), :, :, list(heads)] = 0

    with _edited_heads(_site_with(model, layer, heads, kind), edit):
        yield


@contextmanager
def record_heads(model: nn.Module, layer: int, *, kind: HeadKind | None = None) -> Iterator[list[Tensor]]:
    """Record a layer's head outputs x_BLHP, the input of its output projection; each forward appends to the list."""
    recorded: list[Tensor] = []
    with _edited_heads(_site_with(model, layer, [0], kind), recorded.append):
        yield recorded


def _site_with(model: nn.Module, layer: int, heads: Iterable[int], kind: HeadKind | None) -> HeadSite:
    sites = head_sites(model, kind)
    for head in heads:
        check_exists(model, sites, HeadId(layer, head))
    return next(site for site in sites if site.layer == layer)


@contextmanager
def _edited_heads(site: HeadSite, edit: Callable[[Tensor], None]) -> Iterator[None]:
    """Pass ``edit`` a copy x_BLHP of this layer's head outputs; the output projection then reads the edited copy."""
    forward, reached = site.block.forward, False

    def edited(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal reached
        reached = True
        heads_BLHP = args[0].unflatten(-1, (-1, site.head_dim)).clone()
        edit(heads_BLHP)
        return (heads_BLHP.flatten(-2), *args[1:])

    def run(*args: object, **kwargs: object) -> object:
        nonlocal reached
        reached = False
        # Hooked only during this forward: other layers may run the same module. Prepended: outer contexts edit first.
        with site.o_proj.register_forward_pre_hook(edited, prepend=True):
            output = forward(*args, **kwargs)
        if not reached:
            raise ValueError(
                f"{site.name} did not call its output projection, so its heads were left as they are: "
                "a fused kernel for training did its work; call model.eval() first."
            )
        return output

    with replaced_forward(site.block, run):
        yield


class MixerCall(NamedTuple):
    """Call of a layer's mixer, or of a module around it: arguments, output, and head outputs before ``o_proj``."""

    args: tuple[Any, ...]
    kwargs: Record
    output: tuple[Tensor, ...]
    heads_BLHP: Tensor

    @property
    def hidden_BLD(self) -> Tensor:
        return self.args[0] if self.args else self.kwargs["hidden_states"]


@contextmanager
def watch_calls(site: HeadSite, watched: nn.Module, visit: Callable[[MixerCall], object]) -> Iterator[None]:
    """Pass every finished call of ``watched``, a layer's mixer or a module around it, to ``visit``.

    Tensors are neither copied nor detached.
    """
    heads: list[Tensor] = []

    def before_projection(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        heads[:] = [args[0].unflatten(-1, (-1, site.head_dim))]

    def after(module: nn.Module, args: tuple[Tensor, ...], kwargs: Record, output: Tensor | tuple[Tensor, ...]) -> None:
        visit(MixerCall(args, kwargs, output if isinstance(output, tuple) else (output,), heads[0]))

    with (
        site.o_proj.register_forward_pre_hook(before_projection),
        watched.register_forward_hook(after, with_kwargs=True),
    ):
        yield


@contextmanager
def trace_mixers(model: nn.Module) -> Iterator[dict[int, MixerCall]]:
    """Yield the latest call of each layer's mixer, keyed by layer. For targets, run forward in ``torch.no_grad``."""
    calls: dict[int, MixerCall] = {}
    with ExitStack() as hooks:
        for site in attention_sites(model):
            hooks.enter_context(watch_calls(site, site.module, partial(calls.__setitem__, site.layer)))
        yield calls


@contextmanager
def replay_blocks(model: nn.Module, layer: int, output: object) -> Iterator[None]:
    """Skip layers 0..``layer``: each returns ``output``, the recorded output of layer ``layer``.

    A forward on the same input then computes only the later layers, with the same result. Do not use a cache: the
    skipped layers would leave theirs empty.
    """
    with ExitStack() as restore:
        for _, block in decoder_blocks(model)[: layer + 1]:
            restore.enter_context(replaced_forward(block, lambda *args, **kwargs: output))
        yield


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
    """Replace a module's forward while the context is open; its hooks still run."""
    own = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Disable dropout and gradients; restore the model's mode afterwards."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(was_training)


def generated(model: PreTrainedModel, **options: object) -> Tensor:
    """Return the tokens of ``model.generate``, typed: transformers' decorators hide its return type."""
    generate: Callable[..., Tensor] = getattr(model, "generate")  # noqa: B009
    return generate(**options)


@contextmanager
def eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """Switch to eager attention, the only one that returns attention maps; restore the previous one afterwards."""
    own = model.config._attn_implementation or "eager"
    model.set_attn_implementation("eager")
    try:
        yield
    finally:
        model.set_attn_implementation(own)
