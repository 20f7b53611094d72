"""Cached logits: the files hold the teacher's top k, and training from them is training from the teacher."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import make_family_model
from messages import has_facts, naming
from torch import nn
from torch.testing import assert_close
from training import (
    SMALL,
    die,
    killed,
    losses,
    small_config,
    small_models,
    small_rows,
    word_texts,
    word_tokenizer,
)

from hybrid_distill.cli.app import main
from hybrid_distill.cli.cache_logits import CacheJob, cache_logits
from hybrid_distill.config import PlanConfig, RunConfig, StudentConfig, TeacherConfig
from hybrid_distill.data import (
    CachedLogitsDataset,
    DataConfig,
    LogitHeader,
    PackedRows,
    caching,
    open_rows,
)
from hybrid_distill.data.caching import CHECK_ROWS, top_k_of
from hybrid_distill.data.header import Unfinished
from hybrid_distill.data.logits import open_logits, pack, record_dtype, row_ids_of, unpack
from hybrid_distill.pipeline import RunInputs
from hybrid_distill.pipeline import run as steps
from hybrid_distill.pipeline.checks import check_data
from hybrid_distill.pipeline.run import prepare, train
from hybrid_distill.plan import HeadPlan
from hybrid_distill.teacher import fingerprint
from hybrid_distill.train.config import Align, Distill, DistillOnPolicy
from hybrid_distill.train.loop import train_stage
from hybrid_distill.train.stages import make_stage

WORDS = 99
"""Words of the tokenizer; the model has two more logits, as padded vocabularies do."""
SEQ_LEN = 16
SHARP = {"initializer_range": 0.3}
"""A model that is as sure of some next tokens as trained ones are."""
ROUNDING = 2e-4
"""Nats a token by which a loss may differ because log-probabilities are stored in float16."""
CURVE = 2e-3
"""The same for the losses of 6 steps, relative: AdamW's first steps make much of small gradients."""


@pytest.fixture(scope="module")
def teacher_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher")
    make_family_model("llama", **SMALL, **SHARP).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """About 50 rows, the last of them padded."""
    monkeypatch.setenv("HYBRID_DISTILL_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "text.jsonl"
    lines = [json.dumps({"text": text}) + "\n" for text in word_texts(91)]
    path.write_text("".join(lines))
    return str(path)


@pytest.fixture
def job(teacher_folder: Path, text: str, tmp_path: Path) -> CacheJob:
    """The first 24 rows, in files of 5."""
    run = RunConfig(
        out=tmp_path / "run",
        teacher=TeacherConfig(str(teacher_folder)),
        plan=PlanConfig("random", k=2),
        student=StudentConfig(d_state=4, init="teacher"),
        data=DataConfig(sources=(text,), seq_len=SEQ_LEN),
        stages=(
            Align(steps=2, batch_size=8, micro_batch_size=4),
            Distill(steps=3, batch_size=8, micro_batch_size=4, teacher_logits=tmp_path / "logits"),
        ),
    )
    return CacheJob(run, top_k=6, shard_tokens=5 * SEQ_LEN)


def changed(job: CacheJob, part: str, **changes: Any) -> CacheJob:
    """The job with other options of its run's stage, or section, of that name."""
    if part in job.run.stage_names:
        return replace(job, run=job.run.with_stage(part, **changes))
    section = replace(getattr(job.run, part), **changes)
    return replace(job, run=replace(job.run, **{part: section}))


def top_of(log_probs: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the k most probable ids in the order of their numbers, and their log-probabilities."""
    top, ids = log_probs.topk(k)
    ids, order = ids.sort(-1)
    return ids, top.gather(-1, order)


def test_a_budget_means_the_rows_that_a_run_reads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`--cache` decides that nothing is aligned, so that all `--tokens` go to distillation."""
    jobs: list[CacheJob] = []
    runs: list[RunConfig] = []

    def described(config: RunConfig, _command: str) -> str:
        runs.append(config)
        return ""

    def cached(job: CacheJob) -> str:
        jobs.append(job)
        return ""

    monkeypatch.setattr("hybrid_distill.cli.dry_run.describe", described)
    monkeypatch.setattr("hybrid_distill.cli.cache_logits.cache_logits", cached)
    words = ["tiny", "--cache", "1MB", "--tokens", "2M", "--dry-run"]

    main(["run", *words])
    main(["cache-logits", *words, "--distill.teacher-logits", str(tmp_path)])

    trained = runs[0].resolved()
    cached_for = jobs[0].run.resolved()
    assert trained.stage_names == ("distill",)
    assert cached_for.stage("distill").steps == trained.stage("distill").steps


def contents(folder: Path) -> dict[str, bytes]:
    """Bytes of the shards and of the list of rows."""
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.bin"))}


@pytest.mark.parametrize("n_words", [300, 65_536, 65_537, 200_000])
def test_ids_come_back_exactly_and_probabilities_to_float16(n_words: int) -> None:
    n_rows = 2
    top_k = 20
    in_16_bits = 2**16
    logits_BLV = 3 * torch.randn(n_rows, 5, n_words)
    edges = [0, -1, min(in_16_bits - 1, n_words - 1), min(in_16_bits, n_words - 2)]
    logits_BLV[0, 0, edges] = 15.0
    log_probs_BLV = logits_BLV.log_softmax(-1)
    top_BLK, ids_BLK = log_probs_BLV.topk(top_k)
    log_tail_BL = log_probs_BLV.scatter(-1, ids_BLK, -torch.inf).logsumexp(-1)
    mask_BL = torch.ones(n_rows, 5, dtype=torch.bool)
    mask_BL[1, 3:] = False
    header = LogitHeader(
        "",
        "",
        "",
        "float32",
        "fp32",
        "",
        n_words,
        temperature=1.0,
        top_k=top_k,
        seq_len=5,
        text_fingerprint="",
        order="",
        rows_read=n_rows,
        rows=n_rows,
        shard_rows=1,
    )

    read_ids, read_log_probs = unpack(pack(ids_BLK, top_BLK, log_tail_BL, mask_BL, header))

    # The lower 16 bits of ids, and for each further 65,536 words the number of ids below.
    more_bytes = 2 * ((n_words - 1) // in_16_bits)
    assert record_dtype(header).itemsize == 5 * (top_k * 4 + 2 + more_bytes)

    expected_ids, expected_log_probs = top_of(log_probs_BLV, top_k)
    assert torch.equal(read_ids[mask_BL], expected_ids[mask_BL])
    assert read_ids[~mask_BL].eq(0).all()
    # Float16 has 11 bits of mantissa.
    assert_close(read_log_probs[mask_BL], expected_log_probs[mask_BL], rtol=2**-10, atol=5e-4)
    assert read_log_probs.isfinite().all()

    tail_BL = 1.0 - read_log_probs.double().exp().sum(-1)
    expected_tail = log_tail_BL.exp()[mask_BL]
    assert_close(tail_BL[mask_BL].float(), expected_tail, rtol=5e-3, atol=1e-6)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_the_files_hold_what_the_teacher_says_of_each_document_alone(
    job: CacheJob, temperature: float
) -> None:
    """With rows in a part of the data, padding in the last, and two logits that are no words."""
    job = changed(job, "distill", temperature=temperature, steps=9)

    summary = cache_logits(job)

    run = RunInputs(job.run)
    rows = CachedLogitsDataset(
        open_rows(job.run.data, run.tokenizer),
        open_logits(job.folder),
    )
    batch = rows.batch(1, 36)
    assert batch["seq_idx"].max() > 0
    assert not batch["mask"].all()
    for row, seq_idx in enumerate(batch["seq_idx"]):
        mask = batch["mask"][row]
        for number in seq_idx[mask].unique():
            is_document = mask & (seq_idx == number)
            document = batch["input_ids"][row, is_document]
            with torch.no_grad():
                logits_LV = run.teacher(document[None]).logits[0, :, :WORDS]
            log_probs_LV = (logits_LV / temperature).log_softmax(-1)
            expected_ids, expected_log_probs = top_of(log_probs_LV, 6)
            stored = batch["teacher_log_probs_BLK"][row, is_document]
            assert torch.equal(batch["teacher_ids_BLK"][row, is_document], expected_ids)
            assert_close(stored, expected_log_probs, rtol=2**-10, atol=1e-3)

    header = LogitHeader.load(job.folder / "logits.json")
    assert header.measured["tokens"] == CHECK_ROWS * SEQ_LEN
    first = rows.batch(0, CHECK_ROWS)
    covered = first["teacher_log_probs_BLK"].exp().sum(-1).mean().item()
    assert header.measured["covered"] == pytest.approx(covered, abs=1e-4)
    assert f"{header.measured['covered']:.2%}" in summary


def live_rows(teacher: Any, k: int, temperature: float) -> Any:
    """Rows with the teacher's top k as computed, not rounded."""

    class Live(PackedRows):
        def batch(self, *place: int) -> Any:
            batch = super().batch(*place)
            top = top_k_of(teacher, batch, k, vocab_size=WORDS, temperature=temperature)
            return {
                **batch,
                "teacher_ids_BLK": top.ids_BLK,
                "teacher_log_probs_BLK": top.log_probs_BLK,
            }

    rows = small_rows()
    return Live(rows.sources, seq_len=SEQ_LEN)


@pytest.mark.parametrize(
    "options", [{}, {"kind": "jsd", "temperature": 2.0, "hard_weight": 0.3}], ids=str
)
def test_a_curve_from_disk_is_the_curve_from_the_live_top_k(
    job: CacheJob, tmp_path: Path, options: Any
) -> None:
    """6 steps; with every word stored, it is also that of the whole teacher."""
    config = small_config("distill", steps=6, **options)
    assert isinstance(config, Distill)
    cached = replace(config, teacher_logits=job.folder)
    run = replace(job.run, stages=(job.run.stage("align"), cached))
    of_all_words = replace(job, top_k=WORDS, run=run)
    of_six_words = changed(
        replace(of_all_words, top_k=6), "distill", teacher_logits=tmp_path / "six"
    )
    cache_logits(of_all_words)
    cache_logits(of_six_words)

    def curve(name: str, rows: Any, config: Distill, teacher: Any = None) -> list[float]:
        student, _ = small_models(**SHARP)
        stage = make_stage(config, student, teacher, vocab_size=WORDS)
        train_stage(stage, rows, tmp_path / name, progress=False)
        return losses(tmp_path / name)

    def rows_from(folder: Path) -> CachedLogitsDataset:
        return CachedLogitsDataset(small_rows(), open_logits(folder))

    def assert_same(stored: list[float], expected: list[float]) -> None:
        assert stored[0] == pytest.approx(expected[0], abs=ROUNDING)
        np.testing.assert_allclose(stored, expected, rtol=CURVE)

    _, teacher = small_models(**SHARP)
    whole = curve("whole", small_rows(), config, teacher)
    all_words = curve("all words", rows_from(of_all_words.folder), cached)
    assert_same(all_words, whole)

    six_words = curve("six words", rows_from(of_six_words.folder), cached)
    live = curve("live", live_rows(teacher, 6, config.temperature), cached)
    assert_same(six_words, live)
    assert whole[0] - six_words[0] > 10 * ROUNDING, "six words of 99 should make a difference"

    not_fused = replace(cached, fused=False)
    unfused = curve("unfused", rows_from(of_six_words.folder), not_fused)
    np.testing.assert_allclose(unfused, six_words, rtol=1e-4)


def test_a_killed_command_goes_on_and_leaves_the_same_bytes(
    job: CacheJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache_logits(job)
    whole = contents(job.folder)
    assert list(whole) == [f"logits-0000{n}.bin" for n in range(5)] + ["rows.bin"]
    stopped = changed(job, "distill", teacher_logits=tmp_path / "killed")
    plain = caching.top_k_of
    calls = iter(range(5))

    def one_with_a_kill() -> None:
        def dying(*args: Any, **kwargs: Any) -> Any:
            if next(calls, None) is None:
                die()
            return plain(*args, **kwargs)

        monkeypatch.setattr(caching, "top_k_of", dying)
        cache_logits(stopped)

    killed(one_with_a_kill)
    assert len(list(stopped.folder.glob("logits-*.bin"))) == 2
    assert list(stopped.folder.glob("*.tmp"))
    with pytest.raises(Unfinished):
        open_logits(stopped.folder)

    n_calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal n_calls
        n_calls += 1
        return plain(*args, **kwargs)

    monkeypatch.setattr(caching, "top_k_of", counted)
    cache_logits(stopped)
    # Of 24 rows in files of 5, 14 are missing: files of 5, 5 and 4, in batches of at most 4.
    assert n_calls == 2 + 2 + 1, "files that were whole are made again, or not all others are"
    assert contents(stopped.folder) == whole
    assert not list(stopped.folder.glob("*.tmp"))

    cache_logits(stopped)
    assert n_calls == 5, "a finished folder is made again"


def test_files_without_a_header_are_not_taken_for_this_teachers(job: CacheJob) -> None:
    """Their sizes are those of any teacher's."""
    cache_logits(job)
    whole = contents(job.folder)
    (job.folder / "logits.json").unlink()
    shard = job.folder / "logits-00001.bin"
    shard.write_bytes(bytes(shard.stat().st_size))

    cache_logits(job)

    assert contents(job.folder) == whole


def test_logits_that_are_not_numbers_stop_at_the_first_batch(
    job: CacheJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = caching.top_k_of

    def overflowing(*args: Any, **kwargs: Any) -> Any:
        top = plain(*args, **kwargs)
        return top._replace(log_probs_BLK=torch.full_like(top.log_probs_BLK, torch.nan))

    monkeypatch.setattr(caching, "top_k_of", overflowing)
    with pytest.raises(ValueError, match=naming("float32")):
        cache_logits(job)
    assert not list(job.folder.glob("logits-*.bin"))


def test_more_than_an_epoch_is_every_row_once() -> None:
    rows = small_rows()
    every_row = list(range(rows.n_rows))
    assert row_ids_of(rows, rows.n_rows).tolist() == every_row
    assert row_ids_of(rows, 10**6).tolist() == every_row


def test_rows_of_weighted_sources_have_numbers_of_their_own() -> None:
    rows = small_rows()
    sources = [rows.sources[0]] * 2
    weighted = PackedRows(sources, seq_len=SEQ_LEN, weights=(3, 1))

    first_rows = weighted.row_ids(0, 100)
    assert set(row_ids_of(weighted, 100)) == set(first_rows.tolist())
    assert first_rows.max() >= rows.n_rows

    batch = weighted.batch(3, 4)
    read = weighted.read(weighted.row_ids(3 * 4, 4))
    assert torch.equal(batch["input_ids"], read["input_ids"])


def test_the_whole_data_serves_another_order(job: CacheJob) -> None:
    job = changed(job, "distill", steps=10)
    cache_logits(job)
    run = RunInputs(job.run)
    other_order = open_rows(replace(job.run.data, seed=1), run.tokenizer)
    logits = open_logits(job.folder)

    logits.check_rows(other_order, fingerprint(run.teacher), rows_read=10**6)

    batch = CachedLogitsDataset(other_order, logits).batch(0, 8)
    mask = batch["mask"]
    top = top_k_of(run.teacher, batch, 6, vocab_size=WORDS)
    expected_ids, _ = top.ids_BLK.sort(-1)
    assert torch.equal(batch["teacher_ids_BLK"][mask], expected_ids[mask])


def refusals(job: CacheJob, tmp_path: Path) -> dict[tuple[object, ...], RunConfig]:
    """Runs that must be refused, by the facts that their error names."""
    other_teacher = tmp_path / "other_teacher"
    other_model = make_family_model("llama", **SMALL, **SHARP, seed=5)
    other_model.save_pretrained(other_teacher)
    word_tokenizer().save_pretrained(other_teacher)
    other_tokenizer = tmp_path / "other_tokenizer"
    make_family_model("llama", **SMALL, **SHARP).save_pretrained(other_tokenizer)
    tokenizer = word_tokenizer()
    tokenizer.add_tokens(["w97"])
    tokenizer.save_pretrained(other_tokenizer)
    text = Path(job.run.data.sources[0]).read_text()
    more_text = tmp_path / "more.jsonl"
    more_text.write_text(text + '{"text": "w1"}\n')

    def run(part: str, **changes: Any) -> RunConfig:
        return changed(job, part, **changes).run

    return {
        ("teacher", fingerprint(other_model)): run("teacher", path=str(other_teacher)),
        ("tokenizer",): run("teacher", path=str(other_tokenizer)),
        ("data.seq_len", 16, 8): run("data", seq_len=8),
        ("data.sources",): run("data", sources=(str(more_text),)),
        ("data.seed",): run("data", seed=1),
        ("temperature", 1.0, 2.0): run("distill", temperature=2.0),
        (24, 32): run("distill", steps=4),
        ("nowhere/logits.json",): run("distill", teacher_logits=tmp_path / "nowhere"),
    }


def test_logits_that_do_not_fit_are_refused_before_anything_is_spent(
    job: CacheJob, tmp_path: Path
) -> None:
    cache_logits(job)
    for facts, config in refusals(job, tmp_path).items():
        with pytest.raises(ValueError, match=naming(*facts)):
            prepare(RunInputs(config))
        assert not config.out.exists(), facts
    prepare(RunInputs(job.run))


@pytest.mark.parametrize(
    ("part", "changes"),
    [
        ("data", {"seq_len": 8}),
        ("distill", {"temperature": 2.0}),
        ("distill", {"teacher_logits": Path("nowhere")}),
    ],
)
def test_logits_of_other_settings_are_refused_without_reading_text_or_weights(
    job: CacheJob, part: str, changes: dict[str, Any]
) -> None:
    cache_logits(job)
    with pytest.raises(ValueError, match="logits"):
        check_data(RunInputs(changed(job, part, **changes).run))
    check_data(RunInputs(job.run))


def test_bad_jobs_are_refused(job: CacheJob) -> None:
    with pytest.raises(ValueError, match=naming("--top-k", 100)):
        cache_logits(replace(job, top_k=100))
    with pytest.raises(ValueError, match=naming("--distill.teacher-logits")):
        cache_logits(changed(job, "distill", teacher_logits=None))
    with pytest.raises(ValueError, match=naming("on_policy.teacher_logits")):
        DistillOnPolicy(teacher_logits=job.folder)


def test_a_dry_run_states_the_size_and_writes_nothing(
    job: CacheJob, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        cache_logits(replace(job, run=replace(job.run, dry_run=True)))
    assert has_facts(caplog.text, 24, 16, 26)
    assert not job.folder.exists()


def test_a_folder_of_another_size_is_refused(job: CacheJob) -> None:
    """Refuse a folder with another number of logits a token, and a torn one."""
    cache_logits(job)
    with pytest.raises(ValueError, match=naming(job.folder, "top_k")):
        cache_logits(replace(job, top_k=5))

    path = job.folder / "logits-00002.bin"
    path.write_bytes(path.read_bytes()[:-1])
    bytes_of_token = 6 * 4 + 2
    size = 5 * SEQ_LEN * bytes_of_token
    with pytest.raises(ValueError, match=naming(path, size - 1, size)):
        open_logits(job.folder)


def parameter_bytes() -> int:
    """Bytes of all parameters that are alive, each storage once."""
    gc.collect()
    sizes: dict[int, int] = {}
    for item in gc.get_objects():
        # By type: isinstance asks objects that pretend to be of another class.
        if issubclass(type(item), nn.Parameter) and item.device.type == "cpu":
            storage = item.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


def test_while_it_trains_from_disk_there_is_one_model_in_memory(
    job: CacheJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an alignment, which needs the teacher, in the same process."""
    cache_logits(job)
    before = parameter_bytes()
    seen: dict[str, int] = {}
    plain = steps.train_stage

    def spied(stage: Any, rows: Any, *args: Any, **kwargs: Any) -> Any:
        read = rows.batch
        # A function that holds the stage would hold its teacher.
        name = stage.config.name

        def batch(*place: int) -> Any:
            if name not in seen:
                seen[name] = parameter_bytes() - before
            return read(*place)

        monkeypatch.setattr(rows, "batch", batch)
        return plain(stage, rows, *args, **kwargs)

    monkeypatch.setattr(steps, "train_stage", spied)
    run = RunInputs(job.run)
    prepare(run)
    plan = HeadPlan.random(run.teacher, 2, seed=0)
    student = train(run, plan)

    bytes_of_student = sum(parameter.nbytes for parameter in student.parameters())
    assert seen["distill"] == bytes_of_student
    assert seen["align"] > bytes_of_student
    untrained = open_logits(job.folder).header.teacher_fingerprint
    assert fingerprint(run.teacher) == untrained, "loaded again"

    # A teacher that the caller holds is not dropped.
    again = replace(job.run, out=job.run.out / "handed")
    handed = RunInputs(again, run.teacher_and_tokenizer)
    prepare(handed)
    train(handed, plan)
    assert handed.teacher is run.teacher
    assert fingerprint(run.teacher) == untrained


def test_two_processes_write_the_bytes_of_one(
    job: CacheJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second process first: neither needs the other's files."""
    cache_logits(job)
    two = changed(job, "distill", teacher_logits=tmp_path / "two")
    run = RunInputs(two.run)
    header = LogitHeader.load(job.folder / "logits.json")
    rows = open_rows(job.run.data, run.tokenizer)
    row_ids = row_ids_of(rows, two.config.rows_read)
    two.folder.mkdir()
    caching._start(two.folder, header, row_ids)
    for rank, n_files in ((1, 2), (0, 5)):
        state = SimpleNamespace(process_index=rank, num_processes=2, is_main_process=rank == 0)
        monkeypatch.setattr(caching, "connect", lambda state=state: state)
        caching._write_shards(two.folder, header, run.teacher, rows, row_ids, 4)
        assert len(list(two.folder.glob("logits-*.bin"))) == n_files
    assert contents(two.folder) == contents(job.folder)
