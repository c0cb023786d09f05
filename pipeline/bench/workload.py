"""The work that is measured: a draft, one sample of random states, and the matrix products that a training step on it needs."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from pipeline.bench import timing
from pipeline.bench.step import StepSettings
from pipeline.config.draft import ObjectiveSection
from pipeline.draft.anchors import draw_anchors, usable_anchors
from pipeline.draft.config import FULL, DraftConfig
from pipeline.draft.loss import objective
from pipeline.draft.matmul import times_transposed
from pipeline.draft.model import Draft
from pipeline.records import DraftBatch, TargetBundle

TARGET_LAYERS = (1, 8, 14, 21, 27)
MIN_SECONDS = 0.05
"""A product is repeated until it has taken this long."""
MOST_ELEMENTS = {"cpu": 1 << 24, "cuda": 1 << 27}
"""Of a product's result; a larger one is measured on fewer rows."""


@dataclass(frozen=True, slots=True)
class Workload:
    settings: StepSettings
    draft: Draft
    bundle: TargetBundle
    batch: DraftBatch

    def step(self) -> float:
        """Forward and backward; gradients are left in the draft. The loss."""
        with autocast(self.settings):
            sums = objective(self.draft, self.bundle, self.batch, ObjectiveSection())
        torch.autograd.backward(sums.loss)
        return float(sums.loss.detach())


def autocast(settings: StepSettings) -> AbstractContextManager[object]:
    return torch.autocast(settings.device, torch.bfloat16) if settings.dtype == "bf16-mixed" else nullcontext()


def draft_config(settings: StepSettings) -> DraftConfig:
    return DraftConfig(
        hidden_size=settings.hidden,
        intermediate_size=settings.mlp_width,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.kv_heads,
        head_dim=settings.head_dim,
        vocab_size=settings.vocab,
        num_target_layers=30,
        target_layer_ids=TARGET_LAYERS,
        block_size=settings.block,
        mask_token_id=settings.vocab - 1,
        layer_types=(FULL,) * settings.layers,
        rms_norm_eps=1e-5,
    )


def build(settings: StepSettings) -> Workload:
    """Embedding, head, tokens and states are made as the script that times the peers makes them, in its order and from its seed."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if settings.dtype == "bf16-mixed" else torch.float32
    with torch.device(settings.device):
        embedding = torch.nn.Embedding(settings.vocab, settings.hidden).weight.detach()
        head = torch.nn.Linear(settings.hidden, settings.vocab, bias=False).weight.detach()
        tokens = torch.randint(0, settings.vocab - 1, (1, settings.seq))
        features = torch.randn(1, settings.seq, len(TARGET_LAYERS) * settings.hidden)
        draft = Draft(draft_config(settings))
    usable = usable_anchors(torch.tensor([[0, settings.seq]], dtype=torch.int32).numpy(), settings.seq, settings.block, "full")
    anchors = torch.from_numpy(draw_anchors(0, 0, "bench", usable, settings.anchors)).unsqueeze(0).to(settings.device)
    start = torch.zeros_like(anchors)
    batch = DraftBatch(
        sample_ids=("bench",),
        input_ids=tokens,
        loss_mask=torch.ones_like(tokens, dtype=torch.bool),
        features=features.to(dtype) if settings.device == "cuda" else features,
        position_ids=torch.arange(settings.seq, device=settings.device).unsqueeze(0),
        anchors=anchors,
        document_start=start,
        document_end=start + settings.seq,
        block_valid=torch.ones_like(anchors, dtype=torch.bool),
    ).check()
    bundle = TargetBundle(embedding.to(dtype), head.to(dtype), torch.ones(settings.hidden, device=settings.device), {})
    return Workload(settings, draft, bundle, batch)


@dataclass(frozen=True, slots=True)
class Product:
    """[rows, inner] times [inner, columns], `times` times. Not always whole numbers: means over blocks are among them."""

    name: str
    rows: float
    inner: float
    columns: float
    times: float

    @property
    def flops(self) -> float:
        return 2 * self.rows * self.inner * self.columns * self.times


def step_products(settings: StepSettings, batch: DraftBatch) -> Iterator[Product]:
    """What forward and backward of a step cannot do without: of the head two products on supervised slots (it is frozen); of the context
    what the last anchor sees; of attention what each block sees, two products forward and four backward."""
    hidden, slots, context = settings.hidden, settings.anchors * settings.block, int(batch.anchors.max())
    yield Product("head", settings.supervised_slots, hidden, settings.vocab, 1)
    yield Product("head, backward", settings.supervised_slots, settings.vocab, hidden, 1)
    yield Product("features", context, len(TARGET_LAYERS) * hidden, hidden, 2)
    queries, keys = settings.heads * settings.head_dim, settings.kv_heads * settings.head_dim
    for rows, widths in ((context, (keys, keys)), (slots, (queries, keys, keys, queries, *(settings.mlp_width,) * 3))):
        for width in widths:
            yield Product("projections", rows, hidden, width, 3 * settings.layers)
    seen = float(batch.anchors.double().mean()) + settings.block
    group = settings.heads // settings.kv_heads
    # As tiles have them: the queries of some blocks and of the heads that share keys, on the keys that they see.
    rows = min(settings.anchors, max(1, 256 // (settings.block * group))) * settings.block * group
    times = 3 * settings.layers * settings.heads * slots / rows
    yield Product("attention, scores", rows, settings.head_dim, seen, times)
    yield Product("attention, values", rows, seen, settings.head_dim, times)


def floor_seconds(settings: StepSettings) -> dict[str, float]:
    """Seconds of each kind of product in the dtype of the step, by the quicker of torch's own and ours."""
    dtype = torch.bfloat16 if settings.dtype == "bf16-mixed" else torch.float32
    found: dict[str, float] = {}
    for product in step_products(settings, build(settings).batch):
        seconds = product.flops / product_rate(product, dtype, settings)
        found[product.name] = found.get(product.name, 0.0) + seconds
    return found


def product_rate(product: Product, dtype: torch.dtype, settings: StepSettings) -> float:
    """FLOP a second of such a product."""
    rows = max(1, min(int(product.rows), MOST_ELEMENTS[settings.device] // max(1, int(product.columns))))
    inner, columns = max(1, int(product.inner)), max(1, int(product.columns))
    a, b = torch.randn(rows, inner, device=settings.device).to(dtype), torch.randn(columns, inner, device=settings.device).to(dtype)
    out = torch.empty(rows, columns, dtype=dtype, device=settings.device)
    ways: list[Callable[[], object]] = [lambda: torch.mm(a, b.T, out=out)]
    if dtype == torch.float32 and settings.device == "cpu":
        ways.append(lambda: times_transposed(a, b))
    return 2 * rows * inner * columns / min(seconds_of(way, settings) for way in ways)


def seconds_of(call: Callable[[], object], settings: StepSettings) -> float:
    """Of one call: the least of several, after a first one that does not count."""
    call()
    least, total = float("inf"), 0.0
    while total < MIN_SECONDS:
        begin = now(settings)
        call()
        spent = now(settings) - begin
        least, total = min(least, spent), total + max(spent, 1e-6)
    return least


def now(settings: StepSettings) -> float:
    """When the device has done all that it was given."""
    if settings.device == "cuda":
        torch.cuda.synchronize()
    return timing.now(settings.clock)
