"""What a draft adds to a step of decoding: `stages/bench.py decode`.

One step drafts once: the features of the tokens that the last step committed are taken in, a block goes through the draft, behind a
context of `seq` tokens, and through the target's head, and the likeliest tokens are chosen. The floor is the same matrix products alone,
one after another and each with weights of its own: so few rows take the time that reading the weights takes.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

import torch

from pipeline.bench.step import StepSettings
from pipeline.bench.timing import CLOCKS, in_turns, median_of
from pipeline.bench.workload import TARGET_LAYERS, draft_config
from pipeline.draft.head import head_logits
from pipeline.draft.matmul import times_transposed
from pipeline.draft.model import Draft, joined
from pipeline.draft.serving import Serving
from pipeline.draft.slots import likeliest
from pipeline.records import TargetBundle
from pipeline.report.tables import table

# Rows, inner size and columns of a product, and how many there are.
Shape = tuple[int, int, int, int]

PARTS = {"draft": ("layers", "head"), "layers": ("layers",), "head": ("head",)}

REPEATS = 20
"""Steps that are timed together."""


def bench_decode(settings: StepSettings, committed: int, rounds: int) -> dict[str, Any]:
    """Seconds of a step's drafting, `committed` tokens after the last one, and of its two parts: the draft's layers, and the head."""
    torch.manual_seed(0)
    torch.set_num_threads(settings.threads)
    dtype = torch.bfloat16 if settings.dtype == "bf16-mixed" else torch.float32
    draft = Draft(draft_config(settings)).to(dtype).requires_grad_(False)
    features = torch.randn(1, settings.seq, len(TARGET_LAYERS) * settings.hidden).to(dtype)
    block = torch.randn(1, settings.block, settings.hidden).to(dtype)
    head = torch.randn(settings.vocab, settings.hidden).to(dtype)
    bundle = TargetBundle(head, head, torch.ones(settings.hidden), {})
    serving = Serving(joined(draft), settings.seq + REPEATS * committed)
    serving.extend(features)
    ways: dict[str, Callable[[], None]] = {
        "layers": _drafts(serving, features[:, :committed], block, settings.seq),
        "layers floor": _products(block_products(settings, committed), dtype),
        "head": _choices(block[0], bundle),
        "head floor": _products([(settings.block, settings.hidden, settings.vocab, 1)], dtype),
    }
    with torch.inference_mode():
        seconds = in_turns(ways, rounds, settings.clock)
    each = {name: [value / REPEATS for value in values] for name, values in seconds.items()}
    found: dict[str, Any] = {"settings": {**asdict(settings), "intermediate": settings.mlp_width, "committed": committed, "rounds": rounds}}
    for name, parts in PARTS.items():
        for what, suffix in (("", "seconds"), (" floor", "floor_seconds")):
            together = [sum(values) for values in zip(*(each[part + what] for part in parts), strict=True)]
            found |= median_of(f"{name}_{suffix}" if name != "draft" or not what else suffix, together)
    return found


def as_text(found: dict[str, Any]) -> str:
    """The same as a table, in milliseconds."""
    rows = []
    for label, seconds, floor in (
        ("drafting", "draft_seconds", "floor_seconds"),
        ("  layers", "layers_seconds", "layers_floor_seconds"),
        ("  head and choice", "head_seconds", "head_floor_seconds"),
    ):
        values = (found[seconds], *found[f"{seconds}_range"], found[floor])
        rows.append([label, *(1e3 * value for value in values), found[seconds] / found[floor]])
    settings = found["settings"]
    names = ("seq", "committed", "block", "layers", "hidden", "vocab", "dtype", "threads")
    shape = " ".join(f"{name} {settings[name]}" for name in names)
    return f"{shape}; {CLOCKS[settings['clock']]}\n\n{table(('', 'ms', 'least', 'most', 'products alone', 'ratio'), rows)}"


def _drafts(serving: Serving, features: torch.Tensor, block: torch.Tensor, start: int) -> Callable[[], None]:
    def draft() -> None:
        serving.lengths = [start]
        for _ in range(REPEATS):
            serving.extend(features)
            serving.hidden(block)

    return draft


def _choices(hidden: torch.Tensor, bundle: TargetBundle) -> Callable[[], None]:
    def choose() -> None:
        for _ in range(REPEATS):
            likeliest(head_logits(hidden, bundle.head, bundle))

    return choose


def block_products(settings: StepSettings, committed: int) -> Iterator[Shape]:
    """Of the features of what was committed and of one block."""
    hidden, slots, layers = settings.hidden, settings.block, settings.layers
    queries, keys = settings.heads * settings.head_dim, settings.kv_heads * settings.head_dim
    yield committed, len(TARGET_LAYERS) * hidden, hidden, 1
    yield committed, hidden, keys, 2 * layers
    yield slots, hidden, queries, layers
    yield slots, hidden, keys, 2 * layers
    yield slots, queries, hidden, layers
    yield slots, hidden, settings.mlp_width, 2 * layers
    yield slots, settings.mlp_width, hidden, layers
    rows, seen = slots * settings.heads // settings.kv_heads, settings.seq + REPEATS * committed // 2 + slots
    yield rows, settings.head_dim, seen, settings.kv_heads * layers
    yield rows, seen, settings.head_dim, settings.kv_heads * layers


def _products(shapes: Iterable[Shape], dtype: torch.dtype) -> Callable[[], None]:
    """As the draft's own are done."""
    pairs = [
        (torch.randn(rows, inner).to(dtype), torch.randn(columns, inner).to(dtype))
        for rows, inner, columns, times in shapes
        for _ in range(times)
    ]

    def multiply() -> None:
        for _ in range(REPEATS):
            for a, b in pairs:
                times_transposed(a, b)

    return multiply
