"""One prepared run for a machine with a GPU: `stages/bench.py gpu`, a few minutes, one JSON object at its end.

A training step at the shapes of a draft for Qwen3-8B, with flex_attention and with tiles: time, peak memory, what of the device's
products a second the step turns into its own; whether both give the same loss and gradient; and capture of a random target of that
width, with copies to pinned memory that overlap the next forward, beside the same without overlap and the forward alone.
On a CPU (`--device cpu`, toy shapes) all of it runs but flex_attention, which has no backward there.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3Model

from pipeline.bench.step import StepSettings
from pipeline.bench.timing import in_turns, rate
from pipeline.bench.workload import Product, Workload, build, now, product_rate, step_products
from pipeline.capture.shards import forward_ahead
from pipeline.draft import attend
from pipeline.errors import BenchError
from pipeline.records import TokenSample
from pipeline.report.tables import table
from pipeline.target.forward import run_layers, start_forward
from pipeline.target.load import Target

SQUARE = 8192
"""Rows, inner size and columns of the product that stands for what the device can do."""


@dataclass(frozen=True, slots=True)
class CaptureSettings:
    """A target of `layers` decoder layers, all of which but the last are run; `batches` of `rows` samples of `tokens` tokens."""

    layers: int = 36
    batches: int = 8
    rows: int = 8
    tokens: int = 2048


def bench_gpu(settings: StepSettings, capture: CaptureSettings, rounds: int, peak_tflops: float | None = None) -> dict[str, Any]:
    """`peak_tflops` is what the device's data sheet gives for dense products in the step's dtype. Raises `BenchError` without a GPU."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise BenchError("there is no GPU here; --device cpu with small shapes runs all but what needs one.")
    work = build(settings)
    dtype = torch.bfloat16 if settings.dtype == "bf16-mixed" else torch.float32
    size = SQUARE if settings.device == "cuda" else 256
    best = product_rate(Product("square", size, size, size, 1), dtype, settings)
    flops = sum(product.flops for product in step_products(settings, work.batch))
    found: dict[str, Any] = {
        "settings": {**asdict(settings), "intermediate": settings.mlp_width, "rounds": rounds, "capture": asdict(capture)},
        "device": torch.cuda.get_device_name() if settings.device == "cuda" else "cpu",
        "needed_tflop": flops / 1e12,
        "square_product_tflops": best / 1e12,
        "steps": {},
    }
    gradients: dict[str, torch.Tensor] = {}
    for name in ("flex", "tiled") if settings.device == "cuda" else ("tiled",):
        with _backend(name, settings.device):
            measured = _step(work, rounds)
            gradients[name] = torch.cat([p.grad.flatten() for p in work.draft.parameters() if p.grad is not None])
        measured["tflops"] = flops / measured["seconds"] / 1e12
        measured["of_square_product"] = flops / measured["seconds"] / best
        if peak_tflops is not None:
            measured["mfu"] = measured["tflops"] / peak_tflops
        found["steps"][name] = measured
    if len(gradients) == 2:
        apart = gradients["flex"] - gradients["tiled"]
        found["gradients_apart"] = float(apart.norm() / gradients["tiled"].norm())
        found["flex_times_as_fast"] = found["steps"]["tiled"]["seconds"] / found["steps"]["flex"]["seconds"]
    del work, gradients
    found["capture"] = _capture(settings, capture, rounds)
    return found


def as_text(found: dict[str, Any]) -> str:
    """The same as tables."""
    header = ("", "seconds", "least", "most", "peak GiB", "loss", "TFLOP/s", "of a square product", "MFU")
    rows = [
        [name, s["seconds"], *s["seconds_range"], s["peak_mib"] / 1024, s["loss"], s["tflops"], s["of_square_product"], s.get("mfu", "")]
        for name, s in found["steps"].items()
    ]
    captures = [[name, round(found["capture"][key])] for name, key in CAPTURES.items()]
    apart = f"\ngradients of the two are {found['gradients_apart']:.1e} apart" if "gradients_apart" in found else ""
    return f"{found['device']}\n\n{table(header, rows)}{apart}\n\n{table(('capture', 'tokens/s'), captures)}"


CAPTURES = {
    "copies overlapped": "tokens_per_second",
    "copies in between": "serial_tokens_per_second",
    "forward alone": "bare_tokens_per_second",
}


@contextmanager
def _backend(name: str, device: str) -> Iterator[None]:
    before = attend.FLEX_DEVICES
    attend.FLEX_DEVICES = frozenset({device} if name == "flex" else ())
    try:
        yield
    finally:
        attend.FLEX_DEVICES = before


def _step(work: Workload, rounds: int) -> dict[str, Any]:
    """Gradients of the last step are left in the draft."""
    settings, seconds, loss = work.settings, [], 0.0
    for turn in range(rounds + 2):  # the first two compile, and fill the allocator
        work.draft.zero_grad(set_to_none=True)
        if turn == 2 and settings.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        begin = now(settings)
        loss = work.step()
        if turn >= 2:
            seconds.append(now(settings) - begin)
    peak = torch.cuda.max_memory_allocated() / 2**20 if settings.device == "cuda" else 0.0
    return {"seconds": statistics.median(seconds), "seconds_range": [min(seconds), max(seconds)], "peak_mib": round(peak), "loss": loss}


def _capture(settings: StepSettings, capture: CaptureSettings, rounds: int) -> dict[str, Any]:
    target = _random_target(settings, capture)
    rng = np.random.default_rng(0)
    spans = np.array([[0, capture.tokens]], dtype=np.int32)
    batches = [
        [
            TokenSample(f"{batch}/{row}", "bench", row, "train", rng.integers(0, settings.vocab, capture.tokens).astype(np.int32), spans)
            for row in range(capture.rows)
        ]
        for batch in range(capture.batches)
    ]
    seconds = in_turns(_captures(target, batches), rounds, "wall")
    tokens = capture.batches * capture.rows * capture.tokens
    return {key: value for way, name in CAPTURES.items() for key, value in rate(name, tokens, seconds[way]).items()}


def _captures(target: Target, batches: Sequence[Sequence[TokenSample]]) -> dict[str, Callable[[], None]]:
    ids = [torch.from_numpy(np.stack([sample.input_ids for sample in batch]).astype(np.int64)).to(target.device) for batch in batches]

    def overlapped() -> None:
        for _ in forward_ahead(target, batches):
            pass

    def serial() -> None:
        for batch in batches:
            start_forward(target, batch).to_host().land()

    def forward() -> None:
        for rows in ids:
            run_layers(target, rows, torch.ones_like(rows, dtype=torch.bool))
        if target.device.type == "cuda":
            torch.cuda.synchronize()

    return dict(zip(CAPTURES, (overlapped, serial, forward), strict=True))


def _random_target(settings: StepSettings, capture: CaptureSettings) -> Target:
    """Of the draft's width, in bfloat16; five of its layers are captured, the deepest next to last."""
    config = Qwen3Config(
        vocab_size=settings.vocab,
        hidden_size=settings.hidden,
        intermediate_size=settings.mlp_width,
        num_hidden_layers=capture.layers - 1,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.head_dim,
        attn_implementation="sdpa",
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(settings.device):
            model = Qwen3Model(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    layers = tuple(sorted({round(1 + j * (capture.layers - 3) / 4) for j in range(5)}))
    return Target(
        model=model,
        decoder=model,
        norm=model.norm,
        layer_ids=layers,
        final=False,
        num_layers=capture.layers,
        hidden_size=settings.hidden,
        vocab_size=settings.vocab,
        max_positions=None,
        dtype=torch.bfloat16,
        device=torch.device(settings.device),
        attn_implementation="sdpa",
        config=config.to_dict(),
    )


QWEN3_8B = StepSettings(
    seq=3072,
    anchors=512,
    block=16,
    layers=5,
    hidden=4096,
    vocab=151936,
    dtype="bf16-mixed",
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=12288,
    device="cuda",
)
