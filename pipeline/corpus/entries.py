"""Which entry of `data.train_ds.input_cfg` a sample came from, told by the name of its source.

Weights of entries are a matter of training alone, so a cache says nothing of entries: one cache serves many mixtures, those
captured before there were any included. Where the chats are on this machine, their files are listed as capture listed them; where they
are not, the names of files tell, as long as they tell entries apart.
"""

import re
from collections.abc import Sequence, Set
from fnmatch import fnmatchcase
from pathlib import PurePath

from pipeline.config.schema import DataSection, InputSection
from pipeline.corpus.select import TRAIN
from pipeline.corpus.sources import find_sources
from pipeline.errors import CorpusError


def entries_of(data: DataSection, names: Sequence[str]) -> list[int]:
    """The number of the entry of `data.train_ds.input_cfg` for each of `names`, which are sources of training samples.

    Raises `CorpusError` for a name that belongs to none, or to several and the files are not here.
    """
    inputs = data.train_ds.input_cfg
    try:
        listed = _listed(data)
    except CorpusError:  # the chats are elsewhere
        listed = {}
    if set(names) <= listed.keys():
        return [listed[name] for name in names]
    found = []
    for name in names:
        # Files that share a name are told apart by a number before it (`find_sources`).
        matching = _matching({name, re.sub(r"^\d+:", "", name)}, inputs)
        if len(matching) != 1:
            paths = ", ".join(inputs[number].path for number in matching or range(len(inputs)))
            what = "several entries" if matching else "no entry"
            advice = "Have the chats where these paths name them" if matching else "Add the entry that they came from"
            raise CorpusError(
                f"samples of {name} belong to {what} of data.train_ds.input_cfg ({paths}), so their weight is not known. {advice}, "
                "or train without weights."
            )
        found += matching
    return found


def _listed(data: DataSection) -> dict[str, int]:
    inputs = data.train_ds.input_cfg
    sets = {TRAIN: inputs, **{name: ds.input_cfg for name, ds in data.validation_ds.datasets.items()}}
    names = [source.name for source in find_sources(sets) if source.split == TRAIN]
    owners = [number for number, entry in enumerate(inputs) for _ in find_sources({TRAIN: (entry,)})]
    return dict(zip(names, owners, strict=True))


def _matching(names: Set[str], inputs: Sequence[InputSection]) -> list[int]:
    patterns = [PurePath(entry.path).name.replace("[", "[[]") for entry in inputs]
    return [number for number, pattern in enumerate(patterns) if any(fnmatchcase(name, pattern) for name in names)]
