"""Data sets on the hub: resolved once to a commit, then read at that commit without another request.

The commit of a source is its pin. A run writes its pins into its folder, a token folder into its header, and the token
cache keeps the last pin of each source for a start without a network. So a launch of many processes queries the hub
once, and a later one not at all.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..distributed import from_main
from ..io import Record, read_json, refused, write_json
from ..provenance import now
from ..teacher import hub_error
from ..validation import first_line
from .tokens import hash_of

if TYPE_CHECKING:
    from datasets import IterableDataset
    from huggingface_hub import DatasetInfo

HUB = "hf:"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Pin:
    """Commit at which a data set is read."""

    revision: str
    files: str
    """Hash of the data files at that commit. It stays the same when only texts about the data change."""
    resolved: str = ""
    """Time of the query, UTC."""


Pins = Mapping[str, Pin]
"""Pins by source."""


def is_on_hub(source: str) -> bool:
    """Check whether a source is on the hub. ``hf:`` before a local folder is not: it has no commits."""
    return source.startswith(HUB) and not repository(source).is_dir()


def repository(source: str) -> Path:
    """Return the repository that a source names; it may be a local folder."""
    return Path(source.removeprefix(HUB).split(":")[0]).expanduser()


def config_and_split(source: str) -> tuple[str, str]:
    """Return the config that a source names, "" for the default, and its split."""
    _, _, rest = source.removeprefix(HUB).partition(":")
    config, _, split = rest.partition(":")
    return config, split or "train"


def resolve(source: str) -> Pin:
    """Query the hub for the newest commit of a source. Raises ValueError if it cannot be reached."""
    from huggingface_hub import dataset_info

    with reachable(source):
        # First a short request: without a network, `dataset_info` retries for minutes.
        reason = hub_error()
        if reason:
            raise ConnectionError(reason)
        info = dataset_info(str(repository(source)), files_metadata=True)
        if not info.sha:
            raise ConnectionError("the hub names no commit")
    config, _ = config_and_split(source)
    files = hash_of(_data_of(info, config))
    return Pin(info.sha, files, now())


def pinned(sources: Sequence[str], known: Pins, root: Path) -> dict[str, Pin]:
    """Return the pins of the sources that are on the hub; all processes of a launch must call this.

    The main process resolves those that are not ``known``, and sends them to the others. ``root``, the token cache,
    keeps the answers for a start when the hub cannot be reached. Raises ValueError if it then has none.
    """
    # A dict, not a set: it keeps their order.
    on_hub = [source for source in dict.fromkeys(sources) if is_on_hub(source)]
    missing = [source for source in on_hub if source not in known]
    resolved: dict[str, Pin] = {}
    if missing:

        def resolve_missing() -> dict[str, Pin]:
            return {source: _resolve_or_recall(source, root) for source in missing}

        resolved = from_main(resolve_missing)
    pins = {**known, **resolved}
    return {source: pins[source] for source in on_hub}


def read_pins(path: Path) -> dict[str, Pin]:
    """Read pins that `write_pins` wrote; none if there is no such file. Raises ValueError for any other file."""
    if not path.is_file():
        return {}
    with refused(
        f"{path} does not hold the commits of data sets", "delete it to ask the hub again"
    ):
        return {source: Pin(**record) for source, record in read_json(path).items()}


def write_pins(path: Path, pins: Pins) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {source: asdict(pin) for source, pin in pins.items()})


def open_stream(source: str, pin: Pin | None, position: Record | None) -> IterableDataset:
    """Open a data set at a pinned commit, to be read after a position.

    ``pin`` is None for a local folder. Raises ValueError if it cannot be read.
    """
    from datasets import load_dataset

    config, split = config_and_split(source)
    revision = None if pin is None else pin.revision
    with reachable(source):
        stream: IterableDataset = load_dataset(
            str(repository(source)), config or None, split=split, streaming=True, revision=revision
        )
        if position is not None:
            stream.load_state_dict(position)
    return stream


def records_of(stream: IterableDataset, source: str) -> Iterator[object]:
    """Yield the records of a stream. Raises ValueError, naming ``source``, if one cannot be read."""
    records = iter(stream)
    while True:
        # Around the read alone: an error of the caller, raised at the yield, is not the hub's.
        with reachable(source):
            record = next(records, None)
        if record is None:
            return
        yield record


@contextmanager
def reachable(source: str) -> Iterator[None]:
    """Turn any error of the hub libraries into a one-line ValueError."""
    try:
        yield
    # datasets, fsspec, huggingface_hub and their HTTP libraries raise classes of their own, with no common parent.
    except Exception as error:
        raise ValueError(
            f"cannot read {source} ({first_line(error)}); pass local files with --data.sources PATH, "
            "or run on the embedded corpus with --data.sources tiny."
        ) from error


def _resolve_or_recall(source: str, root: Path) -> Pin:
    """Resolve a source and store its pin; if the hub cannot be reached, return the stored pin."""
    file = root / "sources" / f"{hash_of(source)[:32]}.json"
    try:
        pin = resolve(source)
    except ValueError as error:
        stored = read_pins(file).get(source)
        if stored is None:
            raise
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        log.warning(
            "%s: the hub cannot be reached (%s); reading the commit %s, which it named on %s",
            source,
            first_line(cause),
            stored.revision,
            stored.resolved,
        )
        return stored
    write_pins(file, {source: pin})
    return pin


def _data_of(info: DatasetInfo, config: str) -> list[object]:
    """Return what decides the content of a data set's config: its data files, and what the card says of reading them.

    It is only hashed: another order or length would be other data.
    """
    card: Any = info.card_data
    card_fields: Record = {} if card is None else card.to_dict()
    # A card is text that anybody wrote: any entry may be of another type than it should.
    configs = [entry for entry in card_fields.get("configs") or () if isinstance(entry, dict)]
    own_configs = [entry for entry in configs if entry.get("config_name") == config]
    hash_of_file = _data_files(info)
    names = _files_of(own_configs, list(hash_of_file))
    content = [(name, hash_of_file[name]) for name in sorted(names)]
    return [content, own_configs or configs, card_fields.get("dataset_info")]


def _data_files(info: DatasetInfo) -> dict[str, str | None]:
    """Map the repository's files, but for those about the data, to the hashes of their content."""
    hash_of_file: dict[str, str | None] = {}
    for sibling in info.siblings or ():
        if not _is_about(sibling.rfilename):
            # A large file's blob is a pointer of LFS, whose hash is not that of the content.
            file_hash = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
            hash_of_file[sibling.rfilename] = file_hash
    return hash_of_file


def _files_of(configs: list[Record], names: list[str]) -> set[str]:
    """Return the files that a card's entries list by patterns.

    Including too many files is safe: if there is no pattern, or one matches none, all are returned.
    """
    listed: set[str] = set()
    for entry in configs:
        for pattern in _patterns(entry.get("data_files")):
            matches = {name for name in names if fnmatch(name, pattern)}
            if not matches:
                return set(names)
            listed |= matches
    return listed or set(names)


def _patterns(data_files: object) -> Iterator[str]:
    """Yield the patterns in a card's ``data_files``: a text, a list of texts, or a list of splits and their paths."""
    if isinstance(data_files, str):
        yield data_files
    elif isinstance(data_files, dict):
        yield from _patterns(data_files.get("path") or list(data_files.values()))
    elif isinstance(data_files, list):
        for part in data_files:
            yield from _patterns(part)


def _is_about(name: str) -> bool:
    """Check whether a file is only about the data: its card, a license, a setting of git."""
    if name.lower().endswith((".md", "license", "license.txt")):
        return True
    return any(part.startswith(".") for part in name.split("/"))
