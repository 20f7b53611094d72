"""Bad input of every command: one line with the value and the rule, exit status 2, and nothing written."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from hybrid_distill.cli.app import main

CASES = """
    score --k many: --k is 'many'; it must be a whole number.
    score --k 9999: --k is 9999, and tiny has 48 heads; pass at most 48.
    score --seed -1: --seed is -1; it must be a whole number of at least 0.
    score --examples many: --examples is 'many'; it must be a whole number.
    score --exampels 3 --sede 4: --exampels, --sede are not recognized; did you mean --examples, --seed?
    score --pairs 10,x: --pairs is '10,x'
    score --probe sudoku: there is no probe 'sudoku'
    score --probe kv,needle: --probe is 'kv,needle': a ranking is by one probe
    score --model ./nosuch: --model './nosuch' is not a folder
    export --out x: --model PATH is missing; --help lists the flags.
    evaluate: pass RUN_DIR, or --suite and --model
    evaluate {}: {} is an export, not a run; pass --suite paper --model {}.
    evaluate nowhere --suite kv: pass nowhere without it
    evaluate nowhere --limit 3: --limit
    evaluate --suite kv --model tiny --prompt-format plain: --prompt-format
    evaluate nowhere: nowhere is not a folder; pass the folder of a finished run.
    evaluate --suite kv: --model
    evaluate --model tiny: --suite
    evaluate --model tiny --suite kv --pairs many: --pairs is 'many'
    evaluate --model tiny --suite piqa,kv: piqa
    evaluate --model tiny --suite kv --include-path no/such: no/such
    verify nowhere --device foo: --device is 'foo', which is not usable
    run: no recipe given; pass its name or file first
    run tiny --teacher.attn-implementation flash_attention_2: 'flash_attention_2'
    run tiny --dry-run --teacher.attn-implementation flash_attention_2: 'flash_attention_2'
    recipes large: large is not a recipe; pass a Python file with config(), or one of llama_1b,
    cache-logits tiny --top-k 0: --top-k is 0; it must be a whole number of at least 1.
    memory --heads '': --heads is empty
    memory --heads 4,some: '4,some'
    memory --heads 1000: 1000
    memory --lengths all: 'all'
    memory --model no/such/model: no config
    sweep --heads '': --heads is empty
    sweep --heads 0,49: k is 49
    sweep --d-state 0,4: --d-state is '0,4'; pass whole numbers
    sweep --seeds 0: --seeds is 0
    sweep --selection best: --selection is 'best'; choose from
    sweep --selection layers --heads 2,4: no cell
    sweep --jobs 0: --jobs is 0
    sweep --options timeout_min=5: --cluster
    sweep --set distill.steps: NAME=VALUE
    sweep sweep_llama_1b --set teacher.path=no/such: no/such
    sweep --trackers mlflow: mlflow
    sweep README.md: is not a recipe
    report nowhere: nowhere is neither a run nor a sweep
    analyze prune-layers --last-layer 6: layer 6 does not exist: this model has layers 0..5
    analyze prune-layers --tasks sudoku: unknown task 'sudoku'; pass one of kv
    analyze keep-heads --keep 5:8: head L5H8 does not exist
    analyze keep-heads --keep 5: --keep holds '5'; give a layer and the heads that stay
    analyze keep-heads --keep 5:0 --kind ssm: has no heads of kind 'ssm'
    analyze remove-heads --scores /no/scores.json: does not hold head scores
    analyze formats --formats chat: has no chat template
    analyze formats --formats dialogue: of facts there are completion, text, letter, chat
    analyze carriers --model {models}/falcon_mamba --pairs 2: has Mamba-1 channels, too many to ablate one by one
    analyze carriers --counts 0 --pairs 2: counts[0] is 0
    analyze maps --heads 2:6: '2:6' is not a head; pass one by layer and head, such as L2H6
    analyze maps --heads L0H0 --prompt '{long}': tokens, the model's context
    analyze maps --heads L0H0 --max-gb 0.00001: more than the 0.0 GiB allowed
    analyze maps --model {models}/falcon_mamba: 64 channels a layer, too many to look through; name some
    analyze mask --aggregate L0H8 --pairs 2 --examples 2: with heads 0..7
    analyze mask --tasks knowledge --pairs 2 --examples 2: appears in 0 lines of its prompt
    analyze replace-layer --student /no/student: /no/student
"""
WRITES = {"score": "{}/scores.json", "sweep": "{}/out", "analyze": "{}/out"}


@pytest.mark.parametrize("case", [line.strip() for line in CASES.strip().splitlines()])
def test_bad_input_ends_in_one_line(
    case: str, random_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words, said = case.split(": ", 1)
    if "--suite" in words:
        pytest.importorskip("lm_eval")
    (tmp_path / "gate").mkdir()
    words = words.replace("{models}", str(random_models)).replace("{long}", "heart " * 1100)
    argv = shlex.split(words.replace("{}", str(tmp_path)))
    if place := WRITES.get(argv[0]):
        argv += ["--out", place.format(tmp_path)]
    with pytest.raises(SystemExit) as exit_:
        main(argv)
    *_, error = lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert exit_.value.code == 2 and len(lines) == 1 and said.strip().replace("{}", str(tmp_path)) in error
    assert list(tmp_path.iterdir()) == [tmp_path / "gate"]
