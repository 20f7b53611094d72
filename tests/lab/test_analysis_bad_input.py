"""Bad input of experiments: one line with the value and the rule, exit status 2, and nothing written."""

from __future__ import annotations

from pathlib import Path

import pytest

from hybrid_distill.cli.app import main

FEW = ["--pairs", "2", "--examples", "2"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["prune-layers", "--last-layer", "6"], "layer 6 does not exist: this model has layers 0..5"),
        (["prune-layers", "--tasks", "sudoku"], "there is no task 'sudoku'; there are kv"),
        (["prune-layers", "--tasks", "needle"], "longer than the model's context"),
        (["prune-layers", "--tasks", "lm_eval:piqa", "--data-dir", "/no/data"], "piqa/validation.jsonl"),
        (["keep-heads", "--keep", "5:8"], "head L5H8 does not exist"),
        (["keep-heads", "--keep", "5"], "--keep holds '5'; give a layer and the heads that stay"),
        (["keep-heads", "--keep", "5:0", "--kind", "ssm"], "has no heads of kind 'ssm'"),
        (["remove-heads", "--scores", "/no/scores.json"], "does not hold head scores"),
        (["formats", "--formats", "chat"], "has no chat template"),
        (["formats", "--formats", "dialogue"], "of facts there are completion, text, letter, chat"),
        (["formats", "--of", "kv", "--pairs", "101"], "n_pairs is 101; it must be a whole number from 1 to 100"),
        (["carriers", "--model", "{models}/falcon_mamba", *FEW], "has Mamba-1 channels, too many to ablate one by one"),
        (["carriers", "--model", "{models}/falcon_h1", "--min-accuracy", "1.1", *FEW], "scoring asks for 110.0%"),
        (["carriers", "--counts", "0", *FEW], "counts[0] is 0"),
        (["maps", "--heads", "2:6"], "'2:6' is not a head; pass one by layer and head, such as L2H6"),
        (["maps", "--heads", "L0H0", "--prompt", "heart " * 1100], "tokens, the model's context"),
        (["maps", "--heads", "L0H0", "--max-gb", "0.00001"], "take about 0.0 GiB, more than the 0.0 GiB allowed"),
        (["maps", "--model", "{models}/falcon_mamba"], "64 channels a layer, too many to look through; name some"),
        (["mask", "--aggregate", "L0H8", *FEW], "with heads 0..7"),
        (["mask", "--tasks", "knowledge", *FEW], "stands in 0 lines of its prompt"),
        (["mask", "--k", "0"], "k is 0"),
        (["replace-layer", "--student", "/no/student", "--together", "0"], "together is 0"),
    ],
)
def test_bad_input_ends_in_one_line(
    argv: list[str], message: str, random_models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "lm_eval" in " ".join(argv):
        pytest.importorskip("lm_eval")
    given = [word.replace("{models}", str(random_models)) for word in argv]
    with pytest.raises(SystemExit) as exited:
        main(["analyze", *given, "--out", str(tmp_path / "out")])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert exited.value.code == 2 and error.startswith("error: ") and message in error
    assert not (tmp_path / "out").exists()
