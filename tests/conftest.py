"""Fixtures and options of all tests."""

import os

# Before anything imports torch: tiny models are quickest on one thread (ranks that spin on shared cores are slowest),
# and no test may reach for a hub.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

# A change is judged on the same examples every time; at a desk they are new ones each time.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--goldens", default=None, metavar="DIR", help="folder of golden cases; default: those kept in tests/golden")


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the tiny target with its tokenizer and the ChatML template. Read it, never write into it."""
    from tests.support.tiny import write_target

    return write_target(tmp_path_factory.mktemp("tiny") / "target")


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny_target: Path) -> "PreTrainedTokenizerFast":
    """The tiny target's tokenizer, loaded from its folder."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(tiny_target)


@pytest.fixture(scope="session")
def answering_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny target that ends some of its answers before a limit."""
    from tests.support.tiny import write_answering_target

    return write_answering_target(tmp_path_factory.mktemp("answering") / "target")
