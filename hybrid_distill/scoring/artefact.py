"""What scoring finds: a number for every head, and all that it depends on, in one file.

Shapes: L layer, H query head.
"""

from __future__ import annotations

import datetime
import json
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from ..distill.checkpoint import write_json
from ..plan import HeadId
from ..teacher import fingerprint

FORMAT = "hybrid-distill/head-scores/1"
DROPS = ("accuracy_drop_LH", "logprob_drop_LH", "control_drop_LH")
ERRORS = ("accuracy_se_LH", "logprob_se_LH", "control_se_LH")


@dataclass(frozen=True, eq=False)
class HeadScores:
    """What each head is worth, as float64 tensors [layer, head]; a higher drop means more is lost without it.

    ``accuracy_drop_LH`` is in shares of examples (-1 to 1), ``logprob_drop_LH`` in nats of the answer's
    log-probability, ``control_drop_LH`` in nats of next-token loss per token on plain text (None without
    texts). Standard errors are of paired differences: the same examples with and without the head.
    """

    n_kv_heads: int
    accuracy_drop_LH: Tensor
    logprob_drop_LH: Tensor
    control_drop_LH: Tensor | None
    accuracy_se_LH: Tensor
    logprob_se_LH: Tensor
    control_se_LH: Tensor | None
    baseline: dict[str, Any] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)

    @property
    def n_layers(self) -> int:
        return self.accuracy_drop_LH.shape[0]

    @property
    def n_heads(self) -> int:
        return self.accuracy_drop_LH.shape[1]

    @property
    def fingerprint(self) -> str:
        """Of the teacher that was scored."""
        return self.provenance.get("fingerprint", "")

    def ranking(self) -> list[HeadId]:
        """All heads, best first: by accuracy drop, equal ones by log-probability drop, then (layer, head)."""
        heads = [HeadId(layer, head) for layer in range(self.n_layers) for head in range(self.n_heads)]
        accuracy, logprob = self.accuracy_drop_LH.tolist(), self.logprob_drop_LH.tolist()
        return sorted(heads, key=lambda h: (-accuracy[h.layer][h.head], -logprob[h.layer][h.head], h))

    def save(self, path: str | Path) -> None:
        """Write the scores as JSON; an interrupted write leaves an earlier file as it was."""
        tables = {name: _rows(getattr(self, name)) for name in (*DROPS, *ERRORS)}
        shape = {"n_layers": self.n_layers, "n_heads": self.n_heads, "n_kv_heads": self.n_kv_heads}
        record = {
            "format": FORMAT,
            **shape,
            "baseline": self.baseline,
            "provenance": self.provenance,
            **tables,
        }
        write_json(Path(path), record)

    @classmethod
    def load(cls, path: str | Path) -> HeadScores:
        """Read scores written by `save`. Raises ValueError for a file that holds none."""
        try:
            record = json.loads(Path(path).read_text())
            if record["format"] != FORMAT:
                raise ValueError(f"its format is {record['format']!r}, expected {FORMAT!r}")
            tables: dict[str, Any] = {name: tensor_or_none(record[name]) for name in (*DROPS, *ERRORS)}
            shape = (record["n_layers"], record["n_heads"])
            for name, table in tables.items():
                if table is not None and tuple(table.shape) != shape:
                    raise ValueError(f"{name} is {tuple(table.shape)}, expected {shape} (layers, heads)")
            return cls(
                record["n_kv_heads"], **tables, baseline=record["baseline"], provenance=record["provenance"]
            )
        except (OSError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} holds no head scores ({error}); write them with HeadScores.save."
            ) from error


def _rows(table: Tensor | None) -> list[list[float]] | None:
    return None if table is None else table.tolist()


def tensor_or_none(rows: list[list[float]] | None) -> Tensor | None:
    return None if rows is None else torch.tensor(rows, dtype=torch.float64)


def describe_run(model: PreTrainedModel) -> dict[str, Any]:
    """Which model was measured, and on what: for the provenance of a result."""
    on_gpu = model.device.type == "cuda"
    return {
        "model": model.name_or_path,
        "revision": getattr(model.config, "_commit_hash", None),
        "fingerprint": fingerprint(model),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": torch.cuda.get_device_name(model.device) if on_gpu else model.device.type,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
