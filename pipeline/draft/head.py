"""The target's frozen head on slots, in chunks: losses by slot, and their gradient with respect to the hidden states.

Rows go through the head a chunk at a time, and their gradient is formed on the way, so that no more than a chunk of logits ever
exists and none is computed twice. Rows do not see one another, so weights can be chosen afterwards: a row's gradient is scaled
by whatever the loss of that row is multiplied with. What is minimised is a `SlotLoss`: cross-entropy, or a divergence from a teacher.
"""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import torch

from pipeline.draft.matmul import times_transposed
from pipeline.records import TargetBundle

# Logits held at a time, in elements: 32 MiB of fp32; in bfloat16 three times as many, 48 MiB, and 16 MiB of them in fp32.
CHUNK_LOGITS = 1 << 23


def rows_at_once(head: torch.Tensor) -> int:
    """How many rows make a chunk, at a head [V, H]."""
    return max(1, CHUNK_LOGITS // head.shape[0])


# Channels whose largest value is found at once.
RUN = 256


class SlotLosses(NamedTuple):
    """By row: `loss` fp32 [c], the likeliest token `best` int64 [c], and the token that would have been right, `wanted` int64 [c]."""

    loss: torch.Tensor
    best: torch.Tensor
    wanted: torch.Tensor


# Given logits fp32 [c, V] of the rows in a slice, their losses; the logits are overwritten with the gradient of each row's loss.
SlotLoss = Callable[[torch.Tensor, slice], SlotLosses]


def head_logits(hidden: torch.Tensor, head: torch.Tensor, bundle: TargetBundle) -> torch.Tensor:
    """The target's logits of `hidden` [..., H] (in the dtype of `head`), fp32 [..., V], scaled and capped as the target does."""
    return _scaled(times_transposed(hidden, head).float(), bundle)


def _scaled(logits: torch.Tensor, bundle: TargetBundle) -> torch.Tensor:
    """`logits` fp32, overwritten."""
    if bundle.output_multiplier != 1.0:
        logits *= bundle.output_multiplier
    if bundle.final_logit_softcapping is not None:
        logits = logits.div_(bundle.final_logit_softcapping).tanh_().mul_(bundle.final_logit_softcapping)
    return logits


def head_slope(logits: torch.Tensor, bundle: TargetBundle) -> torch.Tensor | float | None:
    """d logits / d (hidden @ head.T), elementwise, from the logits themselves; None where it is 1."""
    cap, multiplier = bundle.final_logit_softcapping, bundle.output_multiplier
    if cap is not None:
        return (1 - (logits / cap).square()) * multiplier
    return None if multiplier == 1.0 else multiplier


def compute_dtype(tensor: torch.Tensor) -> torch.dtype:
    """The dtype to multiply in: autocast's, or the tensor's own."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def largest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest value of every row of `logits` [M, V], none of them NaN, and the first place where it stands, int64, both [M].

    By runs of channels: on a CPU torch finds values alone four times as quickly as values and places.
    """
    count, runs = logits.shape[0], logits.shape[1] // RUN
    if logits.device.type != "cpu" or not runs or not count:
        return logits.max(dim=1)
    whole = runs * RUN
    by_run = logits[:, :whole].view(count, runs, RUN).amax(dim=2)
    top, run = by_run.max(dim=1)
    place = run * RUN + logits[:, :whole].view(count, runs, RUN)[torch.arange(count), run].argmax(dim=1)
    if whole < logits.shape[1]:
        rest, at = logits[:, whole:].max(dim=1)
        place = torch.where(rest > top, at + whole, place)
        top = torch.maximum(top, rest)
    return top, place


def cross_entropy(labels: torch.Tensor) -> SlotLoss:
    """-log p(label), by row; `labels` int64 [M]."""

    def loss(logits: torch.Tensor, rows: slice) -> SlotLosses:
        label = labels[rows].unsqueeze(1)
        at_label = logits.gather(1, label)
        top, best = (found.unsqueeze(1) for found in largest(logits))
        probabilities = torch.softmax(logits, dim=1, out=logits)
        # The likeliest row has p ≥ 1/V, so this logarithm is exact however unlikely the label is.
        losses = (top - probabilities.gather(1, best).log() - at_label).squeeze(1)
        probabilities.scatter_add_(1, label, torch.full_like(at_label, -1.0))
        return SlotLosses(losses, best.squeeze(1), label.squeeze(1))

    return loss


Divergence = Literal["forward_kl", "reverse_kl", "total_variation"]


def divergence(kind: Divergence, temperature: float, teacher: Callable[[slice], torch.Tensor]) -> SlotLoss:
    """How far the draft's distribution q is from the teacher's p, both at `temperature` T; `teacher` gives logits fp32 [c, V] of rows.

    T²·KL(p ‖ q), T²·KL(q ‖ p), or ½ Σ |p - q|. What would have been right is the teacher's likeliest token.
    """

    def loss(logits: torch.Tensor, rows: slice) -> SlotLosses:
        best, theirs = largest(logits)[1], teacher(rows)
        wanted = largest(theirs)[1]
        log_p, log_q = (torch.log_softmax(x / temperature, dim=1) for x in (theirs, logits))
        if kind == "forward_kl":
            p = log_p.exp()
            losses = temperature**2 * (p * (log_p - log_q)).sum(dim=1)
            torch.sub(log_q.exp_(), p, out=logits).mul_(temperature)
        elif kind == "reverse_kl":
            q, ratio = log_q.exp(), log_q - log_p
            mean = (q * ratio).sum(dim=1, keepdim=True)
            losses = temperature**2 * mean.squeeze(1)
            torch.mul(q, ratio - mean, out=logits).mul_(temperature)
        else:
            q = log_q.exp_()
            apart = q - log_p.exp_()
            losses, side = 0.5 * apart.abs().sum(dim=1), 0.5 * apart.sign()
            torch.mul(q, side - (q * side).sum(dim=1, keepdim=True), out=logits).div_(temperature)
        return SlotLosses(losses, best, wanted)

    return loss


def head_losses(hidden: torch.Tensor, loss: SlotLoss, bundle: TargetBundle) -> SlotLosses:
    """`loss` of every row of `hidden` [M, H] under the target's head, with gradient to `hidden`."""
    losses, best, wanted, _, _ = _Head.apply(hidden, loss, bundle, 0)  # type: ignore[no-untyped-call]
    return SlotLosses(losses, best, wanted)


def head_losses_and_candidates(
    hidden: torch.Tensor, loss: SlotLoss, bundle: TargetBundle, top_k: int
) -> tuple[SlotLosses, torch.Tensor, torch.Tensor]:
    """As `head_losses`, and of every row the `top_k` largest logits, fp32 [M, K] with gradient to `hidden`, and their tokens [M, K]."""
    losses, best, wanted, logits, tokens = _Head.apply(hidden, loss, bundle, top_k)  # type: ignore[no-untyped-call]
    return SlotLosses(losses, best, wanted), logits, tokens


def _slices(start: int, stop: int, most: int) -> Iterator[slice]:
    """[start, stop) in parts of at most `most`, about equal: products of one shape, and none of a few rows."""
    size = -(-(stop - start) // (-(-(stop - start) // most) or 1)) or 1
    for begin in range(start, stop, size):
        yield slice(begin, min(begin + size, stop))


class _Head(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, loss: SlotLoss, bundle: TargetBundle, top_k: int) -> tuple[torch.Tensor, ...]:
        count, dtype = len(hidden), compute_dtype(hidden)
        head = bundle.head.to(dtype)
        grad = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        losses, top = (torch.empty(shape, dtype=torch.float32, device=hidden.device) for shape in ((count,), (count, top_k)))
        best, wanted = torch.empty(2, count, dtype=torch.int64, device=hidden.device)
        tokens = torch.empty(count, top_k, dtype=torch.int64, device=hidden.device)
        most = rows_at_once(head)
        narrow = dtype != torch.float32
        # In bfloat16 products of few rows are slow; what is done with them in fp32 is quicker on few, which stay in the cache.
        at_once, of_them = (3 * most, -(-most // 2)) if narrow else (most, most)
        wide = torch.empty(min(of_them, count) if narrow else 0, head.shape[0], device=hidden.device)
        # Memory that is new to the process costs a third of such a product: all chunks have the same.
        room = head.new_empty(min(at_once, count) if narrow else 0, head.shape[0])
        with torch.autocast(hidden.device.type, enabled=False):
            for chunk in _slices(0, count, at_once):
                some = hidden[chunk].to(dtype)
                products = torch.mm(some, head.T, out=room[: len(some)]) if narrow else times_transposed(some, head)
                for rows in _slices(chunk.start, chunk.stop, of_them):
                    part = products[rows.start - chunk.start : rows.stop - chunk.start]
                    logits = _scaled(wide[: len(part)].copy_(part) if narrow else part, bundle)
                    if top_k:
                        top[rows], tokens[rows] = logits.topk(top_k, dim=1)
                    slope = None if grad is None else head_slope(logits, bundle)
                    losses[rows], best[rows], wanted[rows] = loss(logits, rows)
                    if slope is not None:
                        logits *= slope
                    if grad is not None and narrow:
                        part.copy_(logits)
                if grad is not None:
                    grad[chunk] = times_transposed(products, head.T).to(grad.dtype)
        if grad is not None:
            ctx.save_for_backward(grad, top, tokens)
            ctx.head, ctx.bundle = head, bundle
        ctx.mark_non_differentiable(best, wanted, tokens)
        return losses, best, wanted, top, tokens

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor, _: Any, __: Any, by_top: torch.Tensor, ___: Any) -> tuple[torch.Tensor | None, ...]:
        grad, top, tokens = ctx.saved_tensors
        total = grad * upstream.unsqueeze(1).to(grad.dtype)
        if top.shape[1]:
            slope = head_slope(top, ctx.bundle)
            by_top = by_top if slope is None else by_top * slope
            size = max(1, CHUNK_LOGITS // (top.shape[1] * ctx.head.shape[1]))
            for start in range(0, len(top), size):
                rows = slice(start, start + size)
                one = torch.bmm(by_top[rows].unsqueeze(1).to(ctx.head.dtype), ctx.head[tokens[rows]])
                total[rows] += one.squeeze(1).to(total.dtype)
        return total, None, None, None
