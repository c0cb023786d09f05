"""`data.mode`: where a run's samples and their hidden states come from."""

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.config.schema import Config
from pipeline.runtime.ranks import Ranks
from pipeline.train.data import TrainingData, open_cache
from pipeline.train.hybrid import open_hybrid
from pipeline.train.live import open_live


@contextmanager
def open_data(config: Config, ranks: Ranks) -> Iterator[TrainingData]:
    """The data of `config.data.mode`, for as long as the block runs. Every rank must call it."""
    if config.data.mode == "hybrid":
        with open_hybrid(config, ranks) as data:
            yield data
    else:
        yield open_live(config, ranks) if config.data.mode == "online" else open_cache(config)
