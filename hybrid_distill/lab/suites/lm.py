"""A model as lm-evaluation-harness sees it: its HFLM, which counts or refuses prompts that the context cannot hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm.auto import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase


class PromptsTooLong(ValueError):
    """Prompts that do not fit into the context, and that may not be cut."""


def make_lm(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    accelerator: Accelerator,
    *,
    batch_size: int,
    max_length: int,
    truncate: bool,
) -> Any:
    """An HFLM of this model, which the processes of ``accelerator`` share the requests of.

    ``max_length`` is the context in tokens. A prompt beyond it is cut on the left, as lm-eval does, when ``truncate``
    is set (`n_cut` counts them), and else raises PromptsTooLong before anything is computed. Set `doing` to what the
    progress bar is to say. Raises ValueError for a tokenizer without an end-of-text token, which lm-eval stops at.
    """
    from lm_eval.models.huggingface import HFLM

    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-text token, which lm-eval ends texts with; set its eos_token.")

    base: Any = HFLM

    class CountingLM(base):
        n_cut = 0
        n_requests = 0
        doing = ""
        n_own: int | None = None  # lm-eval repeats the last request of a process that has fewer; those do not count

        def _loglikelihood_tokens(self, requests: Any, disable_tqdm: bool = True, **kwargs: Any) -> Any:
            # The last token is predicted and not read.
            self.count([len(context) + len(continuation) - 1 for _, context, continuation in requests[: self.n_own]])
            with self.progress(len(requests)):
                return super()._loglikelihood_tokens(requests, disable_tqdm=True, **kwargs)

        def loglikelihood(self, requests: Any, disable_tqdm: bool = True) -> Any:
            self.n_own = len(set(map(id, requests)))
            return super().loglikelihood(requests, disable_tqdm=True)

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = True) -> Any:
            self.n_own = None  # what follows are windows of texts
            return super().loglikelihood_rolling(requests, disable_tqdm=True)

        def generate_until(self, requests: Any, disable_tqdm: bool = True) -> Any:
            room = [request.args[1].get("max_gen_toks", self.max_gen_toks) for request in requests]
            if max(room) >= max_length:
                raise PromptsTooLong(
                    f"{max(room)} tokens are to be generated, and the context holds {max_length}; "
                    "take another task, or a model with a longer context."
                )
            lengths = [len(self.tok_encode(r.args[0])) + n for r, n in zip(requests, room, strict=True)]
            self.count(lengths[: len(set(map(id, requests)))])
            with self.progress(len(requests)):
                return super().generate_until(requests, disable_tqdm=True)

        @contextmanager
        def progress(self, n_requests: int) -> Iterator[None]:
            """A bar of our own: lm-eval's would leave a line for each of a hundred parts."""
            hidden = not accelerator.is_main_process
            with tqdm(total=n_requests, desc=self.doing, leave=False, disable=hidden) as bar:
                self.set_cache_hook(_OnAnswer(bar.update))
                yield

        def count(self, lengths: Sequence[int]) -> None:
            """Note how many requests, of all processes, do not fit. All of them raise when they may not be cut."""
            own = (len(lengths), sum(length > max_length for length in lengths), max(lengths, default=0))
            counts: Any = gather_object([own]) if accelerator.num_processes > 1 else [own]
            n_requests, n_cut, longest = sum(c[0] for c in counts), sum(c[1] for c in counts), max(c[2] for c in counts)
            if n_cut and not truncate:
                raise PromptsTooLong(
                    f"{n_cut} of {n_requests} prompts do not fit into the context of {max_length} tokens; the longest "
                    f"needs {longest}. Make them shorter (--fewshot, --pairs, --lengths, --niah-lengths), or have them "
                    "cut on the left, as lm-eval does, with --truncate."
                )
            self.n_requests += n_requests
            self.n_cut += n_cut

    lm: Any = CountingLM(model, tokenizer=tokenizer, batch_size=batch_size, max_length=max_length)
    if accelerator.num_processes > 1:  # HFLM leaves this to whoever hands it a model
        lm.accelerator = accelerator
        lm._rank, lm._world_size = accelerator.process_index, accelerator.num_processes
    return lm


class _OnAnswer:
    """In the place of lm-eval's cache, which hears of every answered request."""

    def __init__(self, answered: Callable[[], Any]) -> None:
        self.answered = answered

    def add_partial(self, attr: str, request: Any, result: Any) -> None:
        self.answered()
