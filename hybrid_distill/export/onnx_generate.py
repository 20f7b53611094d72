"""Greedy generation with a student in ONNX; an export holds this file as generate.py.

Needs onnxruntime and numpy, and tokenizers for text prompts.

python generate.py "The capital of France is" --max-new-tokens 32

Shapes: B batch, L length, S tokens so far (past and input), V vocabulary.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort

States = dict[str, ort.OrtValue]
"""Keys, values and recurrent states of all layers, by the name of the graph's input."""


class Session:
    """Graph loaded from a folder. ``threads`` is the number of cores to use; 0 means all."""

    def __init__(self, folder: str | Path, threads: int = 0) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        # Errors only: it would warn about logits_to_keep, an optional input.
        options.log_severity_level = 3
        file = Path(folder) / "model.onnx"
        self.graph = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self.state_shapes: dict[str, list[int | str]] = {}
        for argument in self.graph.get_inputs():
            if argument.name.startswith("past"):
                self.state_shapes[argument.name] = argument.shape
        metadata = self.graph.get_modelmeta().custom_metadata_map
        self.ends: list[int] = json.loads(metadata["eos_token_id"])

    def first_states(self, batch: int) -> States:
        """Return the states before the first token: no keys and values, zeros elsewhere."""
        symbolic_sizes = {"batch": batch, "past_length": 0}
        states = {}
        for name, symbolic_shape in self.state_shapes.items():
            shape = []
            for size in symbolic_shape:
                shape.append(symbolic_sizes[size] if isinstance(size, str) else size)
            zeros = np.zeros(shape, np.float32)
            states[name] = ort.OrtValue.ortvalue_from_numpy(zeros)
        return states

    def run(
        self, ids_BL: np.ndarray, mask_BS: np.ndarray, states: States, keep: int = 0
    ) -> tuple[np.ndarray, States]:
        """Read tokens; return the logits [B, L, V] of the last ``keep`` ones, and the new states.

        ``keep`` 0 stands for all tokens. ``mask_BS`` is 0 at padding, which must be on the left of
        a row, and also covers the tokens that are already in ``states``.
        """
        feeds = dict(states)
        feeds["input_ids"] = _integers(ids_BL)
        feeds["attention_mask"] = _integers(mask_BS)
        feeds["logits_to_keep"] = _integers(np.array([keep]))
        state_outputs = [name.replace("past_key_values", "present") for name in states]
        outputs = self.graph.run_with_ort_values(["logits", *state_outputs], feeds)
        logits_BLV = outputs[0].numpy()
        new_states = dict(zip(states, outputs[1:]))
        return logits_BLV, new_states


def _integers(values: np.ndarray) -> ort.OrtValue:
    return ort.OrtValue.ortvalue_from_numpy(values.astype(np.int64))


def left_padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Left-pad prompts into one batch; return (ids_BL, mask_BL)."""
    longest = max(map(len, prompts))
    ids_BL = np.zeros((len(prompts), longest), int)
    mask_BL = np.zeros_like(ids_BL)
    for row, prompt in enumerate(prompts):
        start = longest - len(prompt)
        ids_BL[row, start:] = prompt
        mask_BL[row, start:] = 1
    return ids_BL, mask_BL


def generate(
    session: Session, prompts: Sequence[Sequence[int]], max_new_tokens: int = 32
) -> list[list[int]]:
    """Continue prompts greedily, all in one batch.

    Each continuation stops after an end token or ``max_new_tokens``. Raises ValueError for a prompt
    without tokens, and without prompts.
    """
    empty = [number for number, prompt in enumerate(prompts) if not prompt]
    if empty:
        raise ValueError(
            f"prompts[{empty[0]}] has no tokens; pass prompts with at least one token each."
        )
    if not prompts:
        raise ValueError("prompts is empty; pass at least one prompt.")
    ids_BL, mask_BS = left_padded(prompts)
    states = session.first_states(len(prompts))
    has_ended_B = np.zeros(len(prompts), bool)
    continuations: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        logits_BLV, states = session.run(ids_BL, mask_BS, states, keep=1)
        token_B = logits_BLV[:, -1].argmax(-1)
        for row in np.flatnonzero(~has_ended_B):
            continuations[row].append(int(token_B[row]))
        has_ended_B |= np.isin(token_B, session.ends)
        if has_ended_B.all():
            break
        ids_BL = token_B[:, None]
        mask_BS = np.pad(mask_BS, ((0, 0), (0, 1)), constant_values=1)
    return continuations


def main() -> None:
    """Continue the prompts of the command line, with the tokenizer in this file's folder."""
    # Only here: programs that bring token ids need no tokenizer.
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser(description="Continue prompts greedily.")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    options = parser.parse_args()
    folder = Path(__file__).parent
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in options.prompts]
    continuations = generate(Session(folder), prompts, options.max_new_tokens)
    for text, prompt, tokens in zip(options.prompts, prompts, continuations):
        # With their prompt: alone, tokenizers such as Llama 2's drop the space before the first word.
        before = tokenizer.decode(prompt)
        print(text + tokenizer.decode(prompt + tokens)[len(before) :])


if __name__ == "__main__":
    main()
