"""Which chats become samples, and which split a sample belongs to."""

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from pipeline.corpus.rows import Message, Unusable

TRAIN = "train"
HELDOUT = "heldout"

NO_SUPERVISED = "no supervised token"
TOO_FEW = "too few supervised tokens"
MOST_ANSWERS = 500  # the places of n answers take 2 n renders, so what a row costs grows with n²


def check_turns(messages: Sequence[Message]) -> Unusable | None:
    """Why these messages give nothing to learn from, if so."""
    roles = [message["role"] for message in messages if message["role"] != "system"]
    if not roles:
        return Unusable("system only")
    if roles[0] == "assistant":
        return Unusable("assistant first", "an answer needs something before it, and the target was not given any")
    if "assistant" not in roles:
        return Unusable("no assistant turn")
    if roles.count("assistant") > MOST_ANSWERS:
        return Unusable("too many turns", f"{roles.count('assistant')} answers, at most {MOST_ANSWERS}")
    return None


def check_supervised(num_supervised: int, before_cut: int, min_supervised: int) -> Unusable | None:
    """Why a sample of `num_supervised` supervised tokens (`before_cut` before it was cut to max_tokens) is left out, if so."""
    if before_cut == 0:
        return Unusable(NO_SUPERVISED, "the mask is empty")
    if num_supervised < min_supervised:
        cut = f" ({before_cut} before it was cut to max_tokens)" if before_cut > num_supervised else ""
        return Unusable(TOO_FEW, f"{num_supervised} of at least {min_supervised}{cut}")
    return None


def split_of(input_ids: NDArray[np.int32], split: str, heldout_fraction: float) -> str:
    """`split`, or "heldout" for the share `heldout_fraction` of training samples whose hash is lowest.

    The hash is of the whole sample's ids, before it is cut to max_tokens: other rows, their order and another limit move
    no sample across, and two copies of one chat are always on the same side.
    """
    if split != TRAIN or heldout_fraction == 0:
        return split
    digest = blake2b(input_ids.astype("<i4").tobytes(), digest_size=8, person=b"split").digest()
    return HELDOUT if int.from_bytes(digest, "little") < heldout_fraction * 2**64 else split
