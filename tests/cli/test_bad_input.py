"""Bad input of every command: one line that names the value, exit status 2, and nothing written.

A case is a command, and what the line must name.
"""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from messages import has_facts

from hybrid_distill.cli.app import main

CASES = """
    score --k many: --k 'many'
    score --k 9999: --k 9999
    score --seed -1: --seed -1
    score --exampels 3 --sede 4: --examples --seed
    score --pairs 10,x: --pairs '10,x'
    score --probe sudoku: 'sudoku'
    score --probe kv,needle: --probe 'kv,needle'
    score --probe niah_single_1 --pairs 3: --pairs '3' niah_single_1
    score --probe letters --length 64: --length '64' letters
    score --facts {}/gate/empty.jsonl: --facts kv
    score --model ./nosuch: --model './nosuch'
    score --window 100 --exhaustive: --exhaustive
    score --window 16 --sinks 17: --sinks 17
    score --distance 100000: --distance 100000
    score --window 100000: --window 100000
    score --seed 99999999999999: --seed 99999999999999
    run tiny --seed 99999999999999: seed 99999999999999
    run tiny --dry-run --out {}/gate/file/run: {}/gate/file
    run tiny --dry-run --data.sources {}/gate/empty.jsonl: empty.jsonl
    run tiny --dry-run --data.sources {}/gate/latin.txt: latin.txt
    run tiny --dry-run --data.sources {}/gate/other.jsonl: text
    run tiny --dry-run --distill.teacher-logits {}/gate: gate
    generate-data --model tiny --tokens 2K --out {}/out --top-k-logits 100000: --top-k-logits
    score --window 100 --n-control-texts 3: --n-control-texts
    export --out x: --model
    export --model x --out y --max-shard-size 0: --max-shard-size '0'
    export --model x --out y --max-shard-size 5%: --max-shard-size '5%'
    evaluate: RUN_DIR
    evaluate {}: --suite paper --model {}
    evaluate nowhere --suite kv: --suite
    evaluate nowhere --limit 3: --limit
    evaluate nowhere --speed --n-examples 3: --n-examples
    evaluate --suite kv --model tiny --prompt-format plain: --prompt-format
    evaluate nowhere: nowhere
    evaluate --suite kv: --model
    evaluate --model tiny: --suite
    evaluate --suite kv --model tiny --teacher {}/gate: --teacher {}/gate
    evaluate --suite letters --model tiny --facts {}/gate: --facts {}/gate
    evaluate --suite niah,text --model tiny --pairs 3: --pairs '3' niah,text
    evaluate --suite kv --model tiny --texts {}/gate/empty.jsonl: --texts kv
    evaluate --suite kv --model tiny --ruler-lengths 512: --ruler-lengths '512' kv
    evaluate --suite kv --model tiny --cache {}/gate/file: --cache {}/gate/file
    verify nowhere --device foo: --device 'foo'
    run: tiny
    run tiny --teacher.attn-implementation flash_attention_2: 'flash_attention_2'
    run tiny --dry-run --teacher.attn-implementation flash_attention_2: 'flash_attention_2'
    run tiny --dry-run --teacher ./nosuch: './nosuch'
    run tiny --dry-run --distill.teacher ./nosuch: --distill.teacher
    run tiny --dry-run --teacher {}/gate: {}/gate config.json
    run tiny --dry-run --scoring.n-examples x: --scoring.n-examples 'x'
    run tiny --dry-run --distill.lr-scale 1: --distill.lr-scale '1' three
    run tiny --dry-run --plan.selection pairs: plan.selection 'pairs' --plan.pairs
    run tiny --dry-run --plan.selection layers: plan.selection 'layers' --plan.layers
    run tiny --dry-run --evaluation.n-pairs: evaluation.stated_pairs 8
    recipes large: llama_1b
    cache-logits tiny --top-k 0: --top-k 0
    cache-logits tiny --data.seq-len 2048 --distill.teacher-logits {}/out: data.seq_len 2048 1024
    score --sinks 9: --sinks 9 --window
    prepare-data --tokenizer tiny --sources tiny --out {}/out --chat --text-column body: --text-column 'body' --chat
    generate-data --model tiny --tokens 20K --out {}/out --seq-len 99: --seq-len 99 --top-k-logits
    generate-data --model tiny --tokens 4K --out {}/out --top-k-logits 8 --seq-len 2048: --seq-len 2048 1024
    export --model x --out y --format onnx --max-shard-size 1MB: --max-shard-size '1MB' onnx
    memory --heads '': --heads
    memory --heads 4,some: '4,some'
    memory --heads 1000: --heads 1000
    memory --lengths all: 'all'
    memory --model no/such/model: no/such/model
    memory --d-state 3: --d-state 3
    memory --d-state 8,129: --d-state 129
    memory --d-state 0: --d-state 0 --window 0
    memory --sinks -1: --sinks -1
    memory --sinks 4: --sinks 4 --window 0
    memory --window 44,3 --sinks 4: --sinks 4 --window 3
    run tiny --dry-run --student.d-state 3: student.d_state 3
    run tiny --dry-run --student.conv-width 17: student.conv_width 17
    run tiny --dry-run --align-share 0.3: align_share 0.3
    run tiny --dry-run --context 8192: context 8192
    run tiny --show-config: show_config True
    run tiny --dry-run --plan.pairs 5 0: --plan.selection pairs
    run tiny --dry-run --plan.layers 1 2: --plan.selection layers
    run tiny --dry-run --scoring.restoration-examples 8: --plan.selection restoration
    run tiny --dry-run --plan.file plan.json: --plan.selection file
    run tiny --dry-run --scoring.distance 9: scoring.distance 9
    run tiny --dry-run --scoring.other-weights: scoring.other_weights True
    run tiny --dry-run --distill.beta 0.3: --distill.kind jsd
    run tiny --dry-run --tokens 0.3M --distill.steps 7: distill.steps 7 --tokens
    run tiny --dry-run --stages distill --align.steps 7: align.steps 7 --stages
    run tiny --dry-run --student.d-state 0 --student.window 16 --align.steps 7: align.steps 7
    cache-logits tiny --align-share 0.3: align_share 0.3
    sweep --set align-share=0.3: align_share 0.3
    sweep --d-state 3,8: --d-state 3
    sweep --heads 0,49: --heads 49
    sweep --d-state 0,4: --d-state '0,4'
    sweep --seeds 0: --seeds 0
    sweep --selection best: --selection 'best'
    sweep --selection layers --heads 2,4: 8 --heads
    sweep --jobs 0: --jobs 0
    sweep --options timeout_min=5: --cluster
    sweep --set distill.steps: NAME=VALUE
    sweep --set distill.steps=many: 'many'
    sweep --set plan.k=3: --heads
    sweep --set plan.seed=3: --seeds
    sweep --set student.d_state=4: --d-state
    sweep --set cache=1MB: --heads --window
    sweep --set context=100: --heads --window
    sweep --set out=elsewhere: --out
    sweep --set dry_run=true: --dry-run
    sweep --set scoring.file=/no/scores.json: /no/scores.json
    sweep --launcher nonsense: 'nonsense'
    sweep --set student.sinks=4: student.sinks 4
    sweep --window 2 --set student.sinks=4: student.sinks 4 2
    sweep sweep_llama_1b --set teacher.path=no/such: no/such
    sweep --trackers mlflow: mlflow
    sweep README.md: README.md
    report nowhere: nowhere
    report nowhere --context 4096: --context
    report nowhere --context x: --context 'x'
    analyze prune-layers --last-layer 6: 6 0..5
    analyze prune-layers --tasks sudoku: 'sudoku'
    analyze prune-layers --tasks kv:generate,text --facts x: --facts 'x' kv:generate
    analyze keep-heads --keep 5:8: L5H8
    analyze keep-heads --keep 5: --keep '5'
    analyze keep-heads --keep 5:0 --kind ssm: 'ssm'
    analyze remove-heads --scores /no/scores.json: /no/scores.json
    analyze formats --formats chat: chat_template.jinja
    analyze formats --formats dialogue: 'dialogue'
    analyze carriers --model {models}/falcon_mamba --pairs 2: Mamba-1
    analyze carriers --counts 0 --pairs 2: --counts 0
    analyze remove-heads --scores x.json --random-draws -1: --random-draws -1
    analyze remove-heads --scores x.json --examples 0: --examples 0
    analyze maps --prompt '': --prompt ''
    analyze maps --heads 2:6: '2:6'
    analyze maps --heads L0H0 --prompt '{long}': context
    analyze maps --heads L0H0 --max-gb 0.00001: GiB
    analyze maps --model {models}/falcon_mamba: 64 --heads
    analyze mask --aggregate L0H8 --pairs 2 --examples 2: 0..7
    analyze mask --tasks knowledge --pairs 2 --examples 2: 0
    analyze replace-layer --student /no/student: /no/student
"""
WRITES = {"score": "{}/scores.json", "sweep": "{}/out", "analyze": "{}/out"}


@pytest.mark.parametrize("case", [line.strip() for line in CASES.strip().splitlines()])
def test_bad_input_ends_in_one_line(
    case: str, random_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, named = case.split(": ", 1)
    if "--suite" in command:
        pytest.importorskip("lm_eval")

    # A folder that looks like an export.
    gate = tmp_path / "gate"
    gate.mkdir()
    (gate / "file").touch()
    (gate / "empty.jsonl").touch()
    (gate / "latin.txt").write_bytes("é".encode("latin-1"))
    (gate / "other.jsonl").write_text('{"words": "a b"}')

    # More words than the embedded teacher's context.
    command = command.replace("{long}", "heart " * 1100)
    command = command.replace("{models}", str(random_models))
    argv = shlex.split(command.replace("{}", str(tmp_path)))
    if argv[0] in WRITES:
        argv += ["--out", WRITES[argv[0]].format(tmp_path)]

    with pytest.raises(SystemExit) as stopped:
        main(argv)

    assert stopped.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    (error,) = [line for line in lines if line.startswith("error")]
    facts = named.replace("{}", str(tmp_path)).split()
    assert has_facts(error, *facts)
    assert list(tmp_path.iterdir()) == [tmp_path / "gate"], "something was written"


def test_missing_flags_are_named_without_their_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["prepare-data"])
    (line,) = capsys.readouterr().err.splitlines()[-1:]
    assert has_facts(line, "--tokenizer", "--sources", "--out")
    assert not has_facts(line, ".parquet")
