"""Greedy generation with a student in ONNX; needs onnxruntime and numpy, and tokenizers for text prompts.

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
        self.shapes: dict[str, list[int | str]] = {
            put.name: put.shape for put in self.graph.get_inputs() if put.name.startswith("past")
        }
        self.ends = json.loads(self.graph.get_modelmeta().custom_metadata_map["eos_token_id"])

    def first_states(self, batch: int) -> States:
        """Return the states before the first token: no keys and values, zeros elsewhere."""
        sizes = {"batch": batch, "past_length": 0}
        zeros = {
            name: np.zeros([size if isinstance(size, int) else sizes[size] for size in shape], np.float32)
            for name, shape in self.shapes.items()
        }
        return {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in zeros.items()}

    def run(self, ids: np.ndarray, mask: np.ndarray, states: States, keep: int = 0) -> tuple[np.ndarray, States]:
        """Return logits [B, L, V] of the last ``keep`` tokens of ``ids`` [B, L] (0: all), and the states after them.

        ``mask`` [B, S] is 0 at padding, which must be on the left of a row, and also covers the tokens that are already
        in ``states``.
        """
        given = {"input_ids": ids, "attention_mask": mask, "logits_to_keep": np.array([keep])}
        feeds = {name: ort.OrtValue.ortvalue_from_numpy(value.astype(np.int64)) for name, value in given.items()}
        names = {name: name.replace("past_key_values", "present") for name in states}
        logits, *after = self.graph.run_with_ort_values(["logits", *names.values()], feeds | states)
        return logits.numpy(), dict(zip(names, after))


def generate(session: Session, prompts: Sequence[Sequence[int]], max_new_tokens: int = 32) -> list[list[int]]:
    """Continue prompts greedily, all in one batch; each result stops at an end token or ``max_new_tokens``."""
    if not prompts or not all(prompts):
        raise ValueError("a prompt has no tokens; pass at least one prompt, each with at least one token.")
    longest = max(map(len, prompts))
    ids = np.array([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    mask = np.array([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    states, done = session.first_states(len(prompts)), np.zeros(len(prompts), bool)
    written: list[list[int]] = [[] for _ in prompts]
    for _ in range(max_new_tokens):
        logits, states = session.run(ids, mask, states, keep=1)
        best = logits[:, -1].argmax(-1)
        for row in np.flatnonzero(~done):
            written[row].append(int(best[row]))
        done |= np.isin(best, session.ends)
        if done.all():
            break
        ids, mask = best[:, None], np.pad(mask, ((0, 0), (0, 1)), constant_values=1)
    return written


if __name__ == "__main__":
    from tokenizers import Tokenizer

    parser = argparse.ArgumentParser(description="Continue prompts greedily.")
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--max-new-tokens", type=int, default=32)
    options = parser.parse_args()
    folder = Path(__file__).parent
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(prompt).ids for prompt in options.prompts]
    for prompt, tokens in zip(options.prompts, generate(Session(folder), prompts, options.max_new_tokens)):
        print(prompt + tokenizer.decode(tokens))
