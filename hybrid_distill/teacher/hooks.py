"""Record, ablate and replay the outputs of a decoder's heads and layers.

Shapes: B batch, L length, H head, P head dim, D model width, G groups of rows, R rows of a group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..io import Record
from ..plan import HeadId
from .sites import HeadKind, HeadSite, attention_sites, check_exists, decoder_blocks, head_sites


@contextmanager
def ablate_heads(
    model: nn.Module, heads: Iterable[HeadId], *, kind: HeadKind | None = None
) -> Iterator[None]:
    """Ablate heads while the context is open: zero their slices of the output projection's input.

    ``kind`` is as in `head_sites`. The model is restored afterwards, also after an exception;
    contexts may be nested. Raises ValueError for a head that does not exist, and for a forward that
    bypasses the projection.
    """
    sites = head_sites(model, kind)
    heads_of: dict[int, list[int]] = {}
    for layer, head in heads:
        check_exists(model, sites, HeadId(layer, head))
        heads_of.setdefault(layer, []).append(head)

    def zero(which: list[int], heads_BLHP: Tensor) -> None:
        heads_BLHP[..., which, :] = 0

    with ExitStack() as edits:
        for site in sites:
            if site.layer in heads_of:
                edits.enter_context(_edited_heads(site, partial(zero, heads_of[site.layer])))
        yield


@contextmanager
def ablate_heads_by_row(
    model: nn.Module, layer: int, heads: Sequence[int], *, kind: HeadKind | None = None
) -> Iterator[None]:
    """Ablate a different head of one layer in each group of rows: G = ``len(heads)`` in one batch.

    Rows g*B/G to (g+1)*B/G - 1 of a batch of B rows lose head ``heads[g]``. Raises ValueError as
    `ablate_heads` does.
    """
    groups = list(range(len(heads)))

    def zero(heads_BLHP: Tensor) -> None:
        heads_GRLHP = heads_BLHP.unflatten(0, (len(heads), -1))
        # Two lists index in pairs: head heads[g] in group g alone.
        heads_GRLHP[groups, :, :, list(heads)] = 0

    with _edited_heads(_site_with(model, layer, heads, kind), zero):
        yield


@contextmanager
def record_heads(
    model: nn.Module, layer: int, *, kind: HeadKind | None = None
) -> Iterator[list[Tensor]]:
    """Record a layer's head outputs x_BLHP, the input of its output projection.

    Each forward appends to the list.
    """
    recorded: list[Tensor] = []
    with _edited_heads(_site_with(model, layer, [0], kind), recorded.append):
        yield recorded


def _site_with(
    model: nn.Module, layer: int, heads: Iterable[int], kind: HeadKind | None
) -> HeadSite:
    sites = head_sites(model, kind)
    for head in heads:
        check_exists(model, sites, HeadId(layer, head))
    return next(site for site in sites if site.layer == layer)


@contextmanager
def _edited_heads(site: HeadSite, edit: Callable[[Tensor], None]) -> Iterator[None]:
    """Pass ``edit`` a copy x_BLHP of a layer's head outputs, which its projection then reads."""
    forward = site.block.forward
    reached = False

    def edit_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        nonlocal reached
        reached = True
        heads_BLHP = args[0].unflatten(-1, (-1, site.head_dim)).clone()
        edit(heads_BLHP)
        return (heads_BLHP.flatten(-2), *args[1:])

    def run_block(*args: object, **kwargs: object) -> object:
        nonlocal reached
        reached = False
        # Hooked only during this layer's forward: other layers may run the same module.
        # Prepended, so that the edits of an outer context come first.
        with site.o_proj.register_forward_pre_hook(edit_input, prepend=True):
            output = forward(*args, **kwargs)
        # In training mode, mamba_ssm's fused kernel takes the projection's weight, not the module.
        if not reached:
            raise ValueError(
                f"{site.name} did not call its output projection, so its heads were left as they "
                "are: a fused kernel for training did its work; call model.eval() first."
            )
        return output

    with replaced_forward(site.block, run_block):
        yield


class MixerCall(NamedTuple):
    """Call of a layer's mixer, or of a module around it.

    Holds its arguments, its output, and the head outputs that ``o_proj`` read.
    """

    args: tuple[Any, ...]
    kwargs: Record
    output: tuple[Tensor, ...]
    heads_BLHP: Tensor

    @property
    def hidden_BLD(self) -> Tensor:
        return self.args[0] if self.args else self.kwargs["hidden_states"]


@contextmanager
def watch_calls(
    site: HeadSite, watched: nn.Module, visit: Callable[[MixerCall], object]
) -> Iterator[None]:
    """Pass every finished call of ``watched``, a layer's mixer or a module around it, to ``visit``.

    Tensors are neither copied nor detached.
    """
    latest_heads: list[Tensor] = []

    def before_projection(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        # In place: `after` reads the list that it has closed over.
        latest_heads[:] = [args[0].unflatten(-1, (-1, site.head_dim))]

    def after(
        module: nn.Module,
        args: tuple[Tensor, ...],
        kwargs: Record,
        output: Tensor | tuple[Tensor, ...],
    ) -> None:
        outputs = output if isinstance(output, tuple) else (output,)
        visit(MixerCall(args, kwargs, outputs, latest_heads[0]))

    with (
        site.o_proj.register_forward_pre_hook(before_projection),
        watched.register_forward_hook(after, with_kwargs=True),
    ):
        yield


@contextmanager
def trace_mixers(model: nn.Module) -> Iterator[dict[int, MixerCall]]:
    """Yield the latest call of each layer's mixer, keyed by layer.

    For targets, run forward in ``torch.no_grad``.
    """
    calls: dict[int, MixerCall] = {}
    with ExitStack() as hooks:
        for site in attention_sites(model):
            store = partial(calls.__setitem__, site.layer)
            hooks.enter_context(watch_calls(site, site.module, store))
        yield calls


@contextmanager
def replay_blocks(model: nn.Module, layer: int, output: object) -> Iterator[None]:
    """Skip layers 0..``layer``: each returns ``output``, the recorded output of layer ``layer``.

    A forward on the same input then computes only the later layers, with the same result. Do not
    use a cache: the skipped layers would leave theirs empty.
    """

    def replay(*args: object, **kwargs: object) -> object:
        return output

    with ExitStack() as replacements:
        for _, block in decoder_blocks(model)[: layer + 1]:
            replacements.enter_context(replaced_forward(block, replay))
        yield


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
    """Replace a module's forward while the context is open; its hooks still run."""
    # Set already by an outer context, or by a wrapper such as accelerate's dispatch hooks.
    previous_forward = module.__dict__.get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if previous_forward is None:
            del module.forward
        else:
            module.forward = previous_forward
