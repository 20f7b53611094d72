"""`hybrid-distill analyze`: experiments that look inside a model."""

from __future__ import annotations

from typing import Annotated

import tyro

from ..lab.analysis.hybrids import HybridHeadRanking, ReplaceLayer, ZeroedRecurrence
from ..lab.analysis.maps import Maps
from ..lab.analysis.masking import Mask
from ..lab.analysis.rankings import CompareRankings
from ..lab.analysis.removal import Formats, KeepHeads, PruneLayers, RemoveHeads

Experiment = (
    Annotated[RemoveHeads, tyro.conf.subcommand("remove-heads")]
    | Annotated[PruneLayers, tyro.conf.subcommand("prune-layers")]
    | Annotated[KeepHeads, tyro.conf.subcommand("keep-heads")]
    | Annotated[Formats, tyro.conf.subcommand("formats")]
    | Annotated[Mask, tyro.conf.subcommand("mask")]
    | Annotated[ReplaceLayer, tyro.conf.subcommand("replace-layer")]
    | Annotated[ZeroedRecurrence, tyro.conf.subcommand("zeroed-recurrence")]
    | Annotated[HybridHeadRanking, tyro.conf.subcommand("carriers")]
    | Annotated[Maps, tyro.conf.subcommand("maps")]
    | Annotated[CompareRankings, tyro.conf.subcommand("rankings")]
)


def command(
    experiment: tyro.conf.OmitArgPrefixes[tyro.conf.OmitSubcommandPrefixes[Experiment]],
) -> None:
    """Run an experiment on a model's internals (docs/analysis.md); EXPERIMENT --help lists its
    flags."""
    print(experiment.run())
