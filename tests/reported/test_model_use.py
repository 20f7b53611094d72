"""Ways to use a model that public reports found broken elsewhere."""

import os
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import make_family_model
from students import (
    LONGROPE,
    byte_tokenizer,
    close,
    left_padded,
    logits,
    mixed_student,
    tiny_student,
    tokens,
)
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_distill import export_checkpoint
from hybrid_distill.model import HybridForCausalLM

GREEDY: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}


@pytest.fixture(params=["llama", "gpt_neox", "gemma2", "mamba2"])
def student(request: pytest.FixtureRequest) -> HybridForCausalLM:
    if request.param == "mamba2":
        return mixed_student(make_family_model("qwen2"), recurrence="mamba2")
    return mixed_student(make_family_model(request.param))


@pytest.mark.parametrize(
    "options",
    [{}, {"cache_implementation": "static"}, {"num_beams": 2}],
    ids=["greedy", "static cache", "beams"],
)
def test_text_is_generated_from_embeddings(
    options: dict[str, Any], student: HybridForCausalLM
) -> None:
    """unsloth#3796, transformers#45277: ``generate(inputs_embeds=...)``."""
    n_prompt = 11
    ids, mask = left_padded([tokens(n_prompt), tokens(5)])
    options = {"attention_mask": mask, **GREEDY, **options}
    embeddings = student.get_input_embeddings()(ids)

    from_ids = student.generate(ids, **options)
    from_embeddings = student.generate(inputs_embeds=embeddings, **options)

    # Of embeddings, the new tokens alone are returned.
    assert torch.equal(from_embeddings, from_ids[:, n_prompt:])


@torch.no_grad()
def test_text_from_embeddings_goes_over_the_longrope_switch() -> None:
    """unsloth#3796: Phi-3 rotates all keys anew, and reads the prompt's embeddings once more."""
    settings = {"initializer_range": 0.2, "original_max_position_embeddings": 20}
    student = mixed_student(make_family_model("phi3", rope_parameters=LONGROPE, **settings))
    n_prompt = 17
    ids = tokens(2, n_prompt)
    embeddings = student.get_input_embeddings()(ids)
    options = {"attention_mask": torch.ones_like(ids), **GREEDY}

    from_ids = student.generate(ids, **options)
    from_embeddings = student.generate(inputs_embeds=embeddings, **options)

    assert torch.equal(from_embeddings, from_ids[:, n_prompt:])


@torch.no_grad()
def test_outputs_come_as_a_tuple_if_asked_for(student: HybridForCausalLM) -> None:
    """transformers#45277: ``return_dict=False``."""
    ids = tokens(2, 9)
    output = student(ids, labels=ids, return_dict=False)
    expected = student(ids, labels=ids)
    assert type(output) is tuple
    close(output[0], expected.loss)
    close(output[1], expected.logits)


def _last_logits(path: Path, model: PreTrainedModel, ids: Tensor) -> None:
    """Run in a process of its own, to which the model is pickled."""
    torch.save(logits(model, ids), path)


@pytest.mark.launched
def test_a_student_goes_to_a_spawned_process(tmp_path: Path) -> None:
    """x-transformers#141: pickling ended in "not the same object"."""
    student = mixed_student(make_family_model("llama"))
    ids = tokens(2, 9)
    process = get_context("spawn").Process(
        target=_last_logits, args=(tmp_path / "logits.pt", student, ids)
    )
    process.start()
    process.join()
    close(torch.load(tmp_path / "logits.pt"), logits(student, ids))


WITHOUT_THE_PACKAGE = """
import sys
from multiprocessing import get_context
from pathlib import Path

import torch
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

IDS = torch.arange(3, 14)[None]


def write(model, path):
    with torch.no_grad():
        torch.save(model(IDS)[0], path)


if __name__ == "__main__":
    export, out = map(Path, sys.argv[1:])
    model = AutoModelForCausalLM.from_pretrained(export, trust_remote_code=True)
    write(model, out / "logits")
    torch.save(model, out / "model")
    write(torch.load(out / "model", weights_only=False), out / "saved")
    process = get_context("spawn").Process(target=write, args=(model, out / "spawned"))
    process.start()
    process.join()
    write(model.model, out / "hidden")
    write(AutoModel.from_pretrained(export, trust_remote_code=True), out / "auto_model")
    options = {"trust_remote_code": True, "num_labels": 3}
    write(AutoModelForSequenceClassification.from_pretrained(export, **options), out / "classes")
    assert "hybrid_distill" not in sys.modules
"""


@pytest.mark.launched
def test_an_export_that_brings_its_code_is_pickled(tmp_path: Path) -> None:
    """x-transformers#141, with the code of the export; and its other auto classes."""
    student, plan = tiny_student("qwen2")
    export_checkpoint(student, byte_tokenizer(), tmp_path / "export", plan=plan, gate=False)
    script = tmp_path / "without_the_package.py"
    script.write_text(WITHOUT_THE_PACKAGE)
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    command = [sys.executable, script, tmp_path / "export", tmp_path]

    subprocess.run(command, check=True, cwd=tmp_path, env=environment)

    expected = torch.load(tmp_path / "logits")
    close(logits(student, torch.arange(3, 14)[None]), expected)
    close(torch.load(tmp_path / "saved"), expected)
    close(torch.load(tmp_path / "spawned"), expected)
    close(torch.load(tmp_path / "auto_model"), torch.load(tmp_path / "hidden"))
    assert torch.load(tmp_path / "classes").shape == (1, 3)
