"""Table of the speeds that `hybrid-distill evaluate --speed` measured."""

from __future__ import annotations

import pandas as pd

from ...validation import MB


def speed_table(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row per model and length of context, with figures as text."""
    return pd.DataFrame(
        {
            "model": rows.model,
            "context, tokens": rows.length.map("{:,}".format),
            "prefill, tokens/s": rows.prefill.map("{:,.0f}".format),
            "decoding, tokens/s": rows.decode.map("{:,.1f}".format),
            # As memory is unknown on some systems, the numbers may be floats.
            "memory beside the weights, MB": rows.peak_bytes.map(
                lambda n: f"{n / MB:,.0f}", "ignore"
            ),
        }
    )
