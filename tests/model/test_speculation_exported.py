"""A student that is loaded with its own code, without this package, keeps prefixes and speculates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from conftest import make_family_model
from students import ALL_BUT_ONE, THREE, keep
from windows import opened, windowed_student

# None in sys.modules: an import of this package fails.
PROGRAM = """
import sys
sys.modules.update(hybrid_distill=None, hybrid_kernels=None)
import torch
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
torch.manual_seed(0)
folder = sys.argv[1]
student = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
# Something to look up.
prompt = torch.randint(3, 101, (1, 9)).repeat(1, 3)
options = {"max_new_tokens": 20, "eos_token_id": 2, "do_sample": False}
plain = student.generate(prompt, **options)
looked_up = student.generate(prompt, prompt_lookup_num_tokens=4, **options)
assert torch.equal(looked_up[:, : plain.shape[1]], plain)
cache = student.prefill(prompt[:, :20])
cache.save(f"{folder}/prefix.safetensors")
loaded = student.load_cache(f"{folder}/prefix.safetensors", prompt[:, :20])
for prefix in (cache.copy(), loaded):
    assert torch.equal(student.generate(prompt, cache=prefix, **options), plain)
"""


def test_prefixes_and_speculation_travel_with_the_student(tmp_path: Path) -> None:
    teacher = make_family_model("llama")
    plan = keep(teacher, THREE, (), ALL_BUT_ONE)
    student = opened(windowed_student(teacher, plan, recurrence="gdn"))
    student.save_pretrained(tmp_path)
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
