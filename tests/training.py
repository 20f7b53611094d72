"""A stage small enough to train in a second: text, models, settings; also a program to launch.

``accelerate launch tests/training.py OUT`` trains `CHAIN` on as many processes as were launched.
"""

import hashlib
import json
import os
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import tyro
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from conftest import make_family_model

from hybrid_distill.assets import tiny_teacher_path
from hybrid_distill.config import (
    EvaluationConfig,
    PlanConfig,
    RunConfig,
    ScoringConfig,
    StudentConfig,
)
from hybrid_distill.data import DataConfig, PackedRows, Tokens
from hybrid_distill.data.tokens import encode, hash_of, id_dtype
from hybrid_distill.distributed import connect, rank_and_world
from hybrid_distill.model.modeling_hybrid import HybridForCausalLM
from hybrid_distill.plan import HeadPlan
from hybrid_distill.student.build import build_student
from hybrid_distill.student.dtypes import cast_weights
from hybrid_distill.train.config import Align, Distill, DistillOnPolicy, StageConfig
from hybrid_distill.train.loop import train_stage
from hybrid_distill.train.parallel import fsdp2
from hybrid_distill.train.stage import Stage
from hybrid_distill.train.stages import make_stage

CHAIN = ("align", "long", "distill")
"""Stages of `train_chain`."""
SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
QUICK: dict[str, Any] = {"steps": 2, "batch_size": 2, "micro_batch_size": 2}
ALIGN = Align(target="head", **QUICK)
DISTILL = Distill(**QUICK)


def small_run(out: Path = Path("runs/small"), **changes: Any) -> RunConfig:
    """A whole run on the tiny teacher in seconds; it learns nothing worth having."""
    run = RunConfig(
        out=out,
        scoring=ScoringConfig(
            n_pairs=4,
            n_examples=4,
            n_control_texts=2,
            restoration_examples=2,
            min_accuracy=0.0,
        ),
        plan=PlanConfig("random", k=3),
        student=StudentConfig(d_state=4, init="teacher"),
        data=DataConfig(seq_len=64),
        stages=(ALIGN, DISTILL),
        evaluation=EvaluationConfig(n_pairs=(4,), n_examples=4, n_texts=2),
        export=False,
    )
    return replace(run, **changes)


def refusal(capsys: pytest.CaptureFixture[str], config: RunConfig, *argv: str) -> str:
    """Run a config with flags that must end in one line and exit status 2; return the line."""
    from hybrid_distill.cli.app import run_recipe

    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        run_recipe(config, list(argv))
    lines = capsys.readouterr().err.splitlines()
    (error,) = [line for line in lines if line.startswith("error: ")]
    return error


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words w0..w96 are the tokens 2..98; 0 is unknown, 1 ends a document."""
    vocabulary = {"[UNK]": 0, "<eos>": 1} | {f"w{i}": i + 2 for i in range(97)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="[UNK]")


def spaced_tokenizer() -> PreTrainedTokenizerFast:
    """Tokenizer with a space in each word's token, as Llama 2's; decoding drops the first one."""
    words = ["<eos>", "<unk>", "<turn>"]
    words += ["▁The", "▁sky", "▁is", "▁blue"]
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", unk_token="<unk>")


def word_texts(n: int, first: int = 0) -> list[str]:
    """Return documents of 1 to 17 words."""
    texts = []
    for number in range(first, first + n):
        words = [f"w{(7 * number + place) % 97}" for place in range(1 + (5 * number) % 17)]
        texts.append(" ".join(words))
    return texts


def rows_of(texts: list[str], tokenizer: PreTrainedTokenizerFast, seq_len: int = 16) -> PackedRows:
    """Texts in memory, cut into rows."""
    shard = encode(texts, tokenizer, id_dtype(tokenizer))
    fingerprint = hash_of([hashlib.sha256(shard.ids.tobytes()).hexdigest()])
    return PackedRows([Tokens((shard,), tokenizer.eos_token_id, fingerprint)], seq_len=seq_len)


def small_rows(seq_len: int = 16) -> PackedRows:
    """About 50 rows, the last of them padded."""
    return rows_of(word_texts(91), word_tokenizer(), seq_len)


def random_student(teacher: PreTrainedModel, k: int, seed: int = 1) -> HybridForCausalLM:
    """Build a student that keeps ``k`` random heads."""
    plan = HeadPlan.random(teacher.config, k, seed=seed)
    student, _ = build_student(teacher, plan, d_state=4)
    return student


def small_models(k: int = 2, **overrides: Any) -> tuple[HybridForCausalLM, PreTrainedModel]:
    """(student with ``k`` kept heads, its teacher), the same ones on every call."""
    teacher = make_family_model("llama", **{**SMALL, **overrides})
    return random_student(teacher, k), teacher


def sure_models(bf16: bool = False) -> tuple[HybridForCausalLM, PreTrainedModel]:
    """`small_models` with a teacher that is sure of its tokens.

    The loss is then far above the rounding of its terms. With ``bf16`` all weights are, until a
    stage makes those it trains float32.
    """
    student, teacher = small_models(initializer_range=0.1)
    if bf16:
        cast_weights(student, torch.bfloat16)
        cast_weights(teacher, torch.bfloat16)
    return student, teacher


def small_stage(config: StageConfig, **overrides: Any) -> Stage:
    """A stage of new models."""
    return make_stage(config, *small_models(**overrides), vocab_size=99)


CLASSES = {"align": Align, "on_policy": DistillOnPolicy}
SETTINGS: dict[str, dict[str, Any]] = {
    "align": {"loss": "nmse"},
    "distill": {"hard_weight": 0.3, "lr_scale": (0.8, 1.2, 1.0)},
    "on_policy": {"prompt_tokens": 8, "new_tokens": 6},
    # Adam turns rounding into a share of the learning rate.
    "long": {"segment_len": 6, "learning_rate": 1e-3},
}


def small_config(name: str = "align", **changes: Any) -> StageConfig:
    """12 steps of 8 rows, a checkpoint every 4; losses that divide by more than a token count."""
    settings: dict[str, Any] = {
        "steps": 12,
        "batch_size": 8,
        "micro_batch_size": 4,
        "learning_rate": 3e-3,
        "checkpoint_every": 4,
        "log_every": 1,
    }
    settings |= SETTINGS.get(name, {})
    return CLASSES.get(name, Distill)(**{"name": name, **settings, **changes})


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Read the lines that a stage has logged into its folder."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def losses(folder: Path) -> list[float]:
    """Read the losses that a stage has logged."""
    return [line["loss"] for line in metrics(folder)]


def copy_tiny_tokenizer(folder: Path) -> None:
    """Copy the embedded teacher's tokenizer beside another model."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_teacher_path() / name, folder)


class WrappedRows:
    """Rows with a behavior of their own; as they stand, those that they wrap."""

    def __init__(self, rows: PackedRows) -> None:
        self.rows = rows
        self.fingerprint = rows.fingerprint
        self.seq_len = rows.seq_len

    def batch(self, step: int, batch_size: int, rank: int = 0, world: int = 1) -> Any:
        return self.rows.batch(step, batch_size, rank, world)


class StoppingRows(WrappedRows):
    """Rows that call ``action`` when a step's batch is asked for; by default SIGTERM to itself."""

    def __init__(self, rows: PackedRows, step: int, action: Any = None) -> None:
        super().__init__(rows)
        self.step = step
        self.action = action or (lambda: os.kill(os.getpid(), signal.SIGTERM))

    def batch(self, step: int, *args: int) -> Any:
        if step == self.step:
            self.action()
        return super().batch(step, *args)


def killed(action: Callable[[], Any]) -> None:
    """Run ``action`` in a child process, which must die of SIGKILL."""
    child = os.fork()
    if child == 0:
        try:
            # Renews torch's pool, which two threads at once cannot.
            torch.set_num_threads(torch.get_num_threads())
            action()
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def die(*args: Any, **kwargs: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def record_sharded_teachers(path: Path) -> None:
    """Write how many bytes of parameters this process holds of each teacher that is sharded."""
    shard = fsdp2.with_sharded_teacher
    sizes: list[int] = []

    def recording(*args: Any) -> Stage:
        stage = shard(*args)
        n_bytes = 0
        for parameter in stage.teacher.parameters():
            local: Any = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            n_bytes += local.nbytes
        sizes.append(n_bytes)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(sizes))
        return stage

    fsdp2.with_sharded_teacher = recording


def train_chain(
    out: tyro.conf.Positional[Path],
    bf16: bool = False,
    signal_in: str = "",
    signal_at: int = -1,
    number: int = int(signal.SIGTERM),
    teacher_sharding: str = "replicated",
    compiled: bool = False,
    names: tuple[str, ...] = CHAIN,
) -> None:
    """Align, go on with long rows in segments, and distill a new student, 12 steps each; or the stages ``names``.

    The last process gets signal ``number`` when it asks for the batch of step ``signal_at`` of
    the stage ``signal_in``. ``compiled`` layers run torch's own operators.
    """
    changes = {"precision": "bf16", "gradient_checkpointing": True} if bf16 else {}
    if compiled:
        changes["compile"] = "on"
        torch.compile = partial(torch.compile, backend="aot_eager")
    rank, world = rank_and_world()
    for name in names:
        if name != "long":
            student, teacher = sure_models(bf16)
        is_signalled = name == signal_in and rank == world - 1
        stop_at = signal_at if is_signalled else -1
        rows = StoppingRows(small_rows(), stop_at, lambda: os.kill(os.getpid(), number))
        config = small_config(name, micro_batch_size=2, **changes)
        stage = make_stage(config, student, teacher, vocab_size=99)
        train_stage(stage, rows, out / name, progress=False, teacher_sharding=teacher_sharding)


def main() -> None:
    """Train under a launcher."""
    record_sharded_teachers(Path(sys.argv[1]) / f"teacher-{connect().process_index}.json")
    tyro.cli(train_chain)


if __name__ == "__main__":
    main()
