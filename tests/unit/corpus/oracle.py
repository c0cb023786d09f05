"""Expected ids and masks, written by hand: text in pieces, each supervised or not, and the bytes of every token.

Nothing of the pipeline is used, nor are the tokenizer's offsets: tokens of a byte-level tokenizer spell their bytes, so the place of
a token follows from the lengths of those before it. A token counts where its first byte does.
"""

from collections.abc import Iterable, Sequence
from typing import Any

Piece = tuple[str, bool]


def chatml(messages: Sequence[dict[str, str]], default_system: str | None = None, cut_short: bool = False) -> list[Piece]:
    """A chat in ChatML: every answer and its end token supervised, the newline after it not."""
    pieces: list[Piece] = []
    if default_system is not None and messages[0]["role"] != "system":
        pieces.append((f"<|im_start|>system\n{default_system}<|im_end|>\n", False))
    last = max(i for i, m in enumerate(messages) if m["role"] == "assistant")
    for i, message in enumerate(messages):
        answer = message["role"] == "assistant"
        pieces.append((f"<|im_start|>{message['role']}\n", False))
        pieces.append((message["content"], answer))
        pieces.append(("<|im_end|>", answer and not (cut_short and i == last)))
        pieces.append(("\n", False))
    return pieces


def text(pieces: Iterable[Piece]) -> str:
    return "".join(piece for piece, _ in pieces)


def mask(tokenizer: Any, ids: Sequence[int], pieces: Iterable[Piece]) -> list[bool]:
    """For each token whether its first byte is supervised."""
    supervised = [flag for piece, flag in pieces for _ in piece.encode()]
    added = {i: len(token.content.encode()) for i, token in tokenizer.added_tokens_decoder.items()}
    flags, at = [], 0
    for token_id in ids:
        flags.append(supervised[at])
        at += added[token_id] if token_id in added else len(tokenizer.convert_ids_to_tokens(token_id))
    assert at == len(supervised), "the tokens do not spell the text"
    return flags


def runs(flags: Sequence[bool]) -> list[list[int]]:
    """Spans (start, length) of true values."""
    spans: list[list[int]] = []
    for i, flag in enumerate(flags):
        if flag and i and flags[i - 1]:
            spans[-1][1] += 1
        elif flag:
            spans.append([i, 1])
    return spans
