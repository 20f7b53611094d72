"""Greedy generation with a student in ONNX.

Needs onnxruntime and numpy, and tokenizers for text prompts.

python generate.py "The capital of France is" --max-new-tokens 32
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort

States = dict[str, ort.OrtValue]


class Session:
    """Graph loaded from a folder. ``threads`` is the number of cores to use; 0 means all."""

    def __init__(self, folder: str | Path, threads: int = 0) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3  # no warning about logits_to_keep, an optional input
        file = Path(folder) / "model.onnx"
        self.graph = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self.shapes: dict[str, list[int | str]] = {}
        for argument in self.graph.get_inputs():
            if argument.name.startswith("past"):
                self.shapes[argument.name] = argument.shape
        self.ends = json.loads(self.graph.get_modelmeta().custom_metadata_map["eos_token_id"])

    def first_states(self, batch: int) -> States:
        """Return the states before the first token: no keys and values, zeros elsewhere."""
        sizes = {"batch": batch, "past_length": 0}
        states = {}
        for name, symbolic in self.shapes.items():
            shape = [sizes[size] if isinstance(size, str) else size for size in symbolic]
            states[name] = ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, np.float32))
        return states

    def run(
        self, ids: np.ndarray, mask: np.ndarray, states: States, keep: int = 0
    ) -> tuple[np.ndarray, States]:
        """Return logits [B, L, V] of the last ``keep`` tokens of ``ids`` [B, L], and the states after.

        ``keep`` 0 stands for all tokens. ``mask`` [B, S] is 0 at padding, which must be on the left
        of a row, and also covers the tokens that are already in ``states``.
        """
        feeds = dict(states)
        inputs = {"input_ids": ids, "attention_mask": mask, "logits_to_keep": np.array([keep])}
        for name, value in inputs.items():
            feeds[name] = ort.OrtValue.ortvalue_from_numpy(value.astype(np.int64))
        outputs = ["logits"]
        for name in states:
            outputs.append(name.replace("past_key_values", "present"))
        logits, *after = self.graph.run_with_ort_values(outputs, feeds)
        return logits.numpy(), dict(zip(states, after))


def generate(
    session: Session, prompts: Sequence[Sequence[int]], max_new_tokens: int = 32
) -> list[list[int]]:
    """Continue prompts greedily, all in one batch.

    Each result stops at an end token or ``max_new_tokens``.
    """
    if not prompts or not all(prompts):
        raise ValueError("a prompt has no tokens; pass prompts with at least one token each.")
    longest = max(map(len, prompts))
    ids = np.zeros((len(prompts), longest), int)
    mask = np.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = prompt
        mask[row, longest - len(prompt) :] = 1
    states = session.first_states(len(prompts))
    has_ended = np.zeros(len(prompts), bool)
    continued: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        logits, states = session.run(ids, mask, states, keep=1)
        tokens = logits[:, -1].argmax(-1)
        for row in np.flatnonzero(~has_ended):
            continued[row].append(int(tokens[row]))
        has_ended |= np.isin(tokens, session.ends)
        if has_ended.all():
            break
        ids = tokens[:, None]
        mask = np.pad(mask, ((0, 0), (0, 1)), constant_values=1)
    return continued


if __name__ == "__main__":
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser(description="Continue prompts greedily.")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    options = parser.parse_args()
    folder = Path(__file__).parent
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids for prompt in options.prompts]
    answers = generate(Session(folder), prompts, options.max_new_tokens)
    for prompt, tokens in zip(options.prompts, answers):
        print(prompt + tokenizer.decode(tokens))
