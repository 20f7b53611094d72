"""Program for two processes: open the rows of a source; record who asked the hub and tokenized."""

import json
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    tests = Path(__file__).parents[1]
    sys.path[:0] = [
        str(tests.parent),
        str(tests),
        str(tests / "train"),
        str(Path(__file__).parent),
    ]

import datasets
import huggingface_hub
from test_hub import SOURCE, FakeHub
from training import word_tokenizer

from hybrid_distill.data import DataConfig, hub, open_rows, writer
from hybrid_distill.data import config as data_config
from hybrid_distill.distributed import connect


def main(out: Path) -> None:
    rank = connect().process_index
    fake = FakeHub(out / "hub")
    huggingface_hub.dataset_info = fake.dataset_info
    datasets.load_dataset = fake.load_dataset
    # Only the main process has a network.
    fake.is_there = rank == 0
    hub.hub_error = lambda: None if fake.is_there else "HF_HUB_OFFLINE is set"
    n_encoded = 0
    encode = writer.encode

    def counting(texts: list[str], *rest: Any) -> Any:
        nonlocal n_encoded
        n_encoded += len(texts)
        return encode(texts, *rest)

    writer.encode = counting
    config = DataConfig((SOURCE, str(out / "local.txt")), hub_tokens=10_000, seq_len=16)
    rows = open_rows(config, word_tokenizer(), cache_dir=out / "cache")
    data_config.LARGEST_IN_A_LAUNCH = 5
    refused = ""
    try:
        open_rows(
            DataConfig((SOURCE,), hub_tokens=6, seq_len=16),
            word_tokenizer(),
            cache_dir=out / "cache",
        )
    except ValueError as error:
        refused = str(error)
    record = {
        "asked": fake.asked,
        "encoded": n_encoded,
        "rows": rows.fingerprint,
        "refused": refused,
    }
    (out / f"{rank}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
