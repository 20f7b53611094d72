"""An exported student computes what the student computes: without this package, from the cache, in a batch."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from conftest import make_family_model
from safetensors.torch import load_file, save_file
from students import byte_tokenizer, lose_caches, tiny_student
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.dynamic_module_utils import get_relative_imports

from hybrid_distill.cli.export import ExportJob, export_student
from hybrid_distill.evaluation.evaluate import EvalResult
from hybrid_distill.export import ExportError, GateReport, export_checkpoint, origin, verify_export
from hybrid_distill.export.check import Check, left_padded, run_checks, table, weight_files
from hybrid_distill.export.checkpoint import write_configuration
from hybrid_distill.export.versions import checked_transformers
from hybrid_distill.guard import MODEL_CODE, foreign_code
from hybrid_distill.model import HybridForCausalLM, configuration_hybrid, self_check
from hybrid_distill.model.configuration_hybrid import check_version
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student

FAMILIES = ("llama", "qwen2", "olmo3", "phi3", "gpt_neox")
ONE_PROCESS_TO_ANOTHER = 1e-5  # relative to the largest logit
RESULT = EvalResult(
    kv_choice={16: 0.9},
    kv_generation={4: 1.0, 16: 0.875},
    n_examples=128,
    knowledge=0.5,
    knowledge_chance=0.25,
    n_knowledge=100,
    perplexity=12.5,
    top1_agreement=None,
    kl_to_teacher=0.1,
    n_text_tokens=1000,
    cache_bytes={128: 1000, 2048: 16000, 4096: 32000},
    conv_state_bytes=300,
)
ZEROED = {
    "n_examples": 24,
    "figures": {"perplexity": {"whole": 4.9, "zeroed": 9.0}},
    "unused": False,
}

LOAD_ALONE = """
import sys, torch
from transformers import AutoModelForCausalLM
sys.modules.update(hybrid_distill=None, hybrid_kernels=None)
torch.set_num_threads(1)
for folder in sys.argv[1:]:
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
    ids, mask = torch.load(f"{folder}.prompts", weights_only=True)
    logits = model(input_ids=ids[:1]).logits
    tokens = model.generate(ids, attention_mask=mask, do_sample=False, min_new_tokens=12, max_new_tokens=12)
    torch.save((logits, tokens, model.model.config._attn_implementation), f"{folder}.answers")
"""


@pytest.fixture(scope="module")
def exports(tmp_path_factory) -> dict[str, tuple[HybridForCausalLM, Path]]:
    """Each family's student and its export in several files; the first has its card in full."""
    torch.set_num_threads(1)
    made = {}
    for family in FAMILIES:
        student, plan = tiny_student(family, recurrence={"olmo3": "mamba2", "phi3": "gdn"}.get(family, "discrete"))
        path = tmp_path_factory.mktemp(family) / "export"
        results = {"teacher": RESULT, "student": replace(RESULT, recurrent_heads_zeroed=ZEROED)}
        options = {"results": results, "license": "apache-2.0"} if not made else {}
        export_checkpoint(student, byte_tokenizer(), path, plan=plan, max_shard_size="100KB", gate=False, **options)
        made[family] = (student, path)
    return made


@pytest.fixture
def copied(exports, tmp_path, monkeypatch):
    """An export to damage, and the failed checks of a folder by name."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    path = tmp_path / "damaged"
    shutil.copytree(exports["llama"][1], path)

    def failed() -> dict[str, Check]:
        return {check.name: check for check in run_checks(path, path / "gate") if not check.ok}

    return path, failed


SDPA_FOR_SOFT_CAPS = """
from transformers.models.gemma2.modeling_gemma2 import Gemma2PreTrainedModel
Gemma2PreTrainedModel._supports_sdpa = True
"""  # as transformers had it until 5.22: sdpa, which drops the cap, is the default


@pytest.fixture(scope="module")
def soft_capped(tmp_path_factory):
    """A Gemma 2 student whose capped scores matter, and its export."""
    teacher = make_family_model("gemma2", vocab_size=300, attn_logit_softcapping=0.5, query_pre_attn_scalar=1)
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    plan = HeadPlan.from_pairs(teacher, [(0, 1), (1, 0), (1, 2)])
    student, _ = build_student(teacher, plan, d_state=4)
    path = tmp_path_factory.mktemp("gemma2") / "export"
    export_checkpoint(student, None, path, plan=plan, gate=False)
    return student, path


@pytest.mark.launched
def test_loads_and_generates_the_same_in_a_process_without_this_package(exports, soft_capped):
    exports = {**exports, "gemma2": soft_capped}
    generator = torch.Generator().manual_seed(3)
    ids_BL, mask_BL = left_padded([torch.randint(5, 261, (n,), generator=generator) for n in (31, 3, 18)])
    for _, path in exports.values():
        torch.save((ids_BL, mask_BL), f"{path}.prompts")
    folders = [str(path) for _, path in exports.values()]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    cwd = Path(folders[0]).parent
    subprocess.run(
        [sys.executable, "-c", SDPA_FOR_SOFT_CAPS + LOAD_ALONE, *folders],
        check=True,
        cwd=cwd,
        env={**environment, "HF_MODULES_CACHE": str(cwd / "modules")},
    )
    for student, path in exports.values():
        logits, tokens, attention = torch.load(f"{path}.answers", weights_only=True)
        assert attention == student.model.config._attn_implementation
        expected = student(input_ids=ids_BL[:1]).logits
        assert (logits - expected).abs().max() <= ONE_PROCESS_TO_ANOTHER * expected.abs().max()
        options = {"do_sample": False, "min_new_tokens": 12, "max_new_tokens": 12}
        assert torch.equal(tokens, student.generate(ids_BL, attention_mask=mask_BL, **options))


@pytest.mark.parametrize("family", FAMILIES)
def test_every_check_of_the_gate_holds_and_logits_are_the_same_to_the_bit(exports, family, tmp_path, monkeypatch):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    student, path = exports[family]
    checks = run_checks(path, path / "gate")
    assert all(check.ok for check in checks), table(checks)
    names = " ".join(check.name for check in checks)
    for part in ("pickled", "on disk", "tokenizer", "after loading", "reloaded", "cached", "padded", "generated"):
        assert part in names
    tied = {"lm_head.weight"} if family == "qwen2" else set()
    assert weight_files(path).keys() == student.state_dict().keys() - tied, "each tensor once"
    assert len(list(path.glob("model-*.safetensors"))) > 1, "this test is about sharded exports"
    reloaded = AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True, dtype=torch.float32)
    ids_BL = torch.randint(5, 261, (2, 33))
    assert torch.equal(reloaded(input_ids=ids_BL).logits, student(input_ids=ids_BL).logits)


def test_nothing_is_pickled_and_the_code_is_this_packages(exports):
    _, path = exports["llama"]
    kinds = {file.suffix for file in path.rglob("*") if file.is_file()}
    assert kinds == {".safetensors", ".json", ".py", ".md"}
    assert foreign_code(path) == [] and len(list(path.glob("*.py"))) == len(list(MODEL_CODE.glob("*.py"))) - 1
    # Before 5.5, transformers copies a local model's entry file and what that file itself imports, no more.
    imported = {*get_relative_imports(path / "modeling_hybrid.py"), "modeling_hybrid"}
    assert imported == {file.stem for file in path.glob("*.py")}


def test_tokenizer_files_suit_transformers_4(exports):
    _, path = exports["llama"]
    config = json.loads((path / "tokenizer_config.json").read_text())
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert not isinstance(config.get("extra_special_tokens"), list)
    text = "a <tool> of tokens </s>"
    assert AutoTokenizer.from_pretrained(path)(text)["input_ids"] == byte_tokenizer()(text)["input_ids"]


def test_license_and_name_come_from_the_teachers_own_card(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    teacher = tmp_path / "Some-1B"
    teacher.mkdir()
    assert origin(str(teacher)) == ("unknown", "Some-1B")
    (teacher / "README.md").write_text("---\nlicense: llama3.2\n---\n# Some\n")
    assert origin(str(teacher)) == origin("~/Some-1B") == ("llama3.2", "Some-1B")
    (teacher / "README.md").write_text("---\nlicense: [llama3.2\n---\n")
    assert origin(str(teacher)) == ("unknown", "Some-1B"), "a card whose YAML is broken"
    assert origin("tiny") == ("apache-2.0", "")


def test_card_says_what_was_kept_measured_and_allowed(exports):
    _, path = exports["llama"]
    card = (path / "README.md").read_text()
    assert card.startswith("---\nlicense: apache-2.0\n")
    assert "| 1 | 2, 3, 7 | 1, 3 | 5 |" in card
    assert "87.5 ± 3.0" in card
    assert "trust_remote_code=True" in card and "## Limitations" in card
    assert "| perplexity | 4.900 | 9.000 |" in card and "does not use its recurrent heads" not in card
    assert HeadPlan.load(path / "plan.json").k == 4


def test_gate_sees_a_changed_tensor_one_that_is_not_a_number_and_a_pickle(copied):
    path, failed = copied
    for damage in (lambda tensor: tensor.view(-1)[0].add_(1e-3), lambda tensor: tensor.fill_(float("nan"))):
        file = next(path.glob("model-00001*.safetensors"))
        tensors = load_file(file)
        name = sorted(tensors)[0]
        damage(tensors[name])
        save_file(tensors, file, metadata={"format": "pt"})
        checks = failed()
        assert f"{name} has changed" in checks["63 tensors on disk: wrong"].detail
        assert f"{name} is not what was exported" in checks["63 tensors after loading: wrong"].detail
    assert "reloaded = exported model, logits" in checks
    (path / "pytorch_model.bin").write_bytes(b"")
    assert failed()["pickled files"].detail == "pytorch_model.bin"


@pytest.mark.launched
def test_verify_fails_loudly_when_decoding_or_padding_is_wrong(copied):
    path, _ = copied
    with (path / "ssd.py").open("a") as code:
        code.write("\nright = ssd_step\ndef ssd_step(*a):\n    y, state = right(*a)\n    return 0.9 * y, state\n")
    with (path / "mixer.py").open("a") as code:
        code.write("\nright = SSMHeads.forward\nSSMHeads.forward = lambda *a: right(*a[:2], None, *a[3:])\n")
    with pytest.raises(ValueError, match=r"mixer.py, ssd.py in .* --trust-remote-code"):
        verify_export(path)
    said = verify_export(path, trust_remote_code=True).table()
    failed = [line for line in said.splitlines() if line.startswith("FAILED")]
    assert "cached decode = full forward" in failed[0] and "left-padded batch = single" in failed[1]
    assert "ok       reloaded = exported model" in said


def test_an_export_is_replaced_whole_or_not_at_all(exports, copied, monkeypatch):
    student, _ = exports["llama"]
    path, _ = copied
    plan, before = HeadPlan.load(path / "plan.json"), (path / "gate" / "reference.json").read_bytes()
    bad = GateReport((Check("cached decode", 1.0, 0.1),))
    monkeypatch.setattr("hybrid_distill.export.gate.run_gate", lambda *_, **__: bad)
    with pytest.raises(ExportError, match=rf"{path} failed the export gate"):
        export_checkpoint(student, None, path, plan=plan)
    assert (path / "gate" / "reference.json").read_bytes() == before
    student.train()
    assert export_checkpoint(student, None, path, plan=plan, gate=False).checks == () and student.training
    student.eval()
    assert not (path / "tokenizer.json").exists() and (path / "model.safetensors").is_file()
    assert [other.name for other in path.parent.iterdir() if other.name != "modules"] == [path.name]


def test_refuses_a_folder_that_is_not_an_export(exports, tmp_path):
    student, path = exports["llama"]
    plan = HeadPlan.load(path / "plan.json")
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(ValueError, match="holds files that are not an export"):
        export_checkpoint(student, None, tmp_path, plan=plan, gate=False)
    with pytest.raises(ValueError, match="is not a folder"):
        export_checkpoint(student, None, tmp_path / "thesis.tex", plan=plan, gate=False)
    with pytest.raises(ValueError, match="is not an export"):
        verify_export(tmp_path)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is a run; pass its export, .*export\.$"):
        verify_export(tmp_path)
    (tmp_path / "export").rename(tmp_path / "top")
    (tmp_path / "top" / "export").mkdir()
    (tmp_path / "top" / "config.json").rename(tmp_path / "top" / "export" / "config.json")
    with pytest.raises(ValueError, match=r"contains several runs; pass the export of one, such as .*top/export\.$"):
        verify_export(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_refuses_another_plan_and_empty_tensors(tmp_path):
    student, plan = tiny_student("llama")
    with pytest.raises(ValueError, match="the plan keeps"):
        export_checkpoint(student, None, tmp_path / "export", plan=HeadPlan.none(plan), gate=False)
    student.model.norm.weight = torch.nn.Parameter(torch.empty(0))
    with pytest.raises(ExportError, match=r"empty tensors: model\.norm\.weight"):
        export_checkpoint(student, None, tmp_path / "export", plan=plan, gate=False)
    assert list(tmp_path.iterdir()) == []


def test_an_older_transformers_is_refused_in_one_line(exports, copied, monkeypatch):
    path, _ = copied
    checked = json.loads((path / "config.json").read_text())["checked_transformers"]
    assert checked[0] == "5.2.0"
    assert checked[-1] == transformers.__version__
    assert "`transformers` 5.2.0 or newer" in (path / "README.md").read_text()
    monkeypatch.setattr(configuration_hybrid.transformers, "__version__", "5.1.3")
    for load in (AutoModelForCausalLM.from_pretrained, HybridForCausalLM.from_pretrained):
        with pytest.raises(ValueError, match=r"^this .* 5\.2\.0 or newer, found 5\.1\.3; pip .*$"):
            load(path, trust_remote_code=True)
    monkeypatch.setattr(configuration_hybrid.transformers, "__version__", "5.3.0.dev0")
    assert isinstance(HybridForCausalLM.from_pretrained(path), HybridForCausalLM)


def test_versions_are_compared_as_numbers_and_an_odd_one_is_refused(monkeypatch):
    monkeypatch.setattr(configuration_hybrid.transformers, "__version__", "5.9.1")
    for oldest in ("5.2.0", "5.9", "5.9.1"):
        check_version([oldest, "5.23.0"])
    check_version(None)
    for newer in ("5.10.4", "5.9.2", "6.0"):
        with pytest.raises(ValueError, match=newer.replace(".", r"\.")):
            check_version([newer])
    for odd in (["newest"], ["5"], [5.2], ["5.2.0", "5.0.0; import os"], "5.2.0", []):
        with pytest.raises(ValueError, match="checked_transformers"):
            check_version(odd)
    monkeypatch.undo()
    assert checked_transformers("a-model-of-tomorrow") == [transformers.__version__]
    assert checked_transformers("aria_text")[0] == "5.18.0"


def test_an_export_checks_itself_once_under_a_transformers_that_is_not_in_its_record(copied, monkeypatch):
    path, _ = copied
    config_file = path / "config.json"
    config = json.loads(config_file.read_text())
    config["checked_transformers"] = ["5.2.0", "5.3.0"]
    config_file.write_text(json.dumps(config))
    n_checks = []
    real = self_check.check_rows

    def counted(*args):
        n_checks.append(args)
        real(*args)

    # As transformers 5.24 did to exports of 5.23: the cache has another name, and no head is given one.
    with monkeypatch.context() as broken:
        lose_caches(broken)
        with pytest.raises(ValueError, match=rf"cache with transformers {transformers.__version__}.*5\.3\.0") as error:
            HybridForCausalLM.from_pretrained(path)
        assert "\n" not in str(error.value)
        assert not (path / self_check.PASSED).exists()
    monkeypatch.setattr(self_check, "check_rows", counted)
    for _ in range(2):
        HybridForCausalLM.from_pretrained(path)
    assert len(n_checks) == 1
    assert json.loads((path / self_check.PASSED).read_text()) == [transformers.__version__]


def test_an_offloaded_export_checks_itself_too(copied, tmp_path):
    path, _ = copied
    config_file = path / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"checked_transformers": ["5.2.0"]}))
    options = {"device_map": {"model": "disk", "lm_head": "cpu"}, "offload_folder": tmp_path / "offload"}
    HybridForCausalLM.from_pretrained(path, **options)
    assert (path / self_check.PASSED).is_file()


def test_a_missing_and_an_unknown_tensor_are_refused_in_one_line(copied):
    path, _ = copied
    assert HybridForCausalLM.from_pretrained(path, dtype=torch.bfloat16, device_map="cpu").dtype == torch.bfloat16
    file = sorted(path.glob("*.safetensors"))[0]
    index_file = path / "model.safetensors.index.json"
    tensors = load_file(file)
    gone = sorted(tensors)[0]
    changed = {"model.nobody.asked.weight" if name == gone else name: tensor for name, tensor in tensors.items()}
    save_file(changed, file, metadata={"format": "pt"})
    index = json.loads(index_file.read_text())
    index["weight_map"]["model.nobody.asked.weight"] = index["weight_map"].pop(gone)
    index_file.write_text(json.dumps(index))
    with pytest.raises(ValueError, match=rf"missing: {gone}; .*unexpected: model\.nobody\.asked\.weight\); .*"):
        HybridForCausalLM.from_pretrained(path)
    _, info = HybridForCausalLM.from_pretrained(path, output_loading_info=True)
    assert set(info["missing_keys"]) == {gone} and set(info["unexpected_keys"]) == {"model.nobody.asked.weight"}


def test_the_attention_that_was_checked_is_recorded_and_used(soft_capped, tmp_path):
    _, path = soft_capped
    assert json.loads((path / "config.json").read_text())["checked_attention"] == "eager"
    student, plan = tiny_student("llama")
    path = tmp_path / "export"
    export_checkpoint(student, None, path, plan=plan, gate=False)
    student.model.config._attn_implementation = "flash_attention_2"  # of a GPU: elsewhere there may be none
    write_configuration(student, path, "remote-code")
    config = json.loads((path / "config.json").read_text())
    assert config["checked_attention"] == "sdpa"
    (path / "config.json").write_text(json.dumps({**config, "checked_attention": "eager"}))
    loaded = HybridForCausalLM.from_pretrained(path)
    assert loaded.model.config._attn_implementation == loaded.config._attn_implementation == "eager"
    asked = HybridForCausalLM.from_pretrained(path, attn_implementation="sdpa")
    assert asked.model.config._attn_implementation == "sdpa"
    (path / "config.json").write_text(json.dumps({**config, "checked_attention": "somebody/kernels"}))
    with pytest.raises(ValueError, match="checked_attention is 'somebody/kernels'; it must be one of sdpa, eager"):
        HybridForCausalLM.from_pretrained(path)


def test_an_export_that_was_changed_is_not_exported_again(copied, tmp_path) -> None:
    path, _ = copied
    file = sorted(path.glob("*.safetensors"))[0]
    tensors = load_file(file)
    name = sorted(tensors)[0]
    save_file({**tensors, name: tensors[name] + 0.5}, file, metadata={"format": "pt"})
    with pytest.raises(ExportError, match=f"has changed since its export.*{re.escape(name)} has changed"):
        export_student(ExportJob(path, tmp_path / "again"))
    assert not (tmp_path / "again").exists()
    assert (path / "gate" / "reference.safetensors").stat().st_mode == (path / "config.json").stat().st_mode
