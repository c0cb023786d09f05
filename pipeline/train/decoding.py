"""A few answers decoded for real at each validation: what serving would give at this moment of the training."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pipeline.config.schema import Config
from pipeline.corpus.chat import load_tokenizer
from pipeline.decode.speculative import check_rewindable, speculative_decode
from pipeline.draft.model import Draft, joined
from pipeline.errors import ConfigError
from pipeline.records import TargetBundle
from pipeline.runtime.ranks import Ranks
from pipeline.target.head import bundle_of
from pipeline.target.load import Target, load_target
from pipeline.train.data import TrainingData, validation_sets
from pipeline.train.evaluate import given_up
from pipeline.train.run import served_copy
from pipeline.train.served import stop_tokens
from pipeline.train.step import reduce_sums

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class ShortDecoding:
    """The whole target, and this rank's share of the prompts."""

    target: Target
    bundle: TargetBundle
    prompts: Sequence[Sequence[int]]
    stop_ids: tuple[int, ...]
    max_new_tokens: int
    ranks: Ranks

    @classmethod
    def load(cls, config: Config, ranks: Ranks, data: TrainingData) -> "ShortDecoding":
        """Load the target, besides one that online training has. The prompts are the first validation samples, each up to its first answer.

        Every rank must call it. Raises `ConfigError` where there is no target or no prompt, `TargetError` for a target that cannot be
        loaded or decoded with.
        """
        section, wanted = config.model.target, config.trainer.val_decode_prompts
        if section.path is None:
            raise ConfigError("trainer.val_decode_prompts needs the target: name it in model.target.path, or set val_decode_prompts to 0.")
        if section.tp_size != ranks.tp_size:
            raise ConfigError(
                f"trainer.val_decode_prompts loads the whole target on every rank here, and model.target.tp_size is {section.tp_size}: a "
                "target that one rank cannot hold is there with data.mode=online only. Set val_decode_prompts to 0, or tp_size to 1."
            )
        numbers = [number for numbers in validation_sets(data).values() for number in numbers]
        prompts: list[list[int]] = []
        for number in numbers:
            tokens = data.source([number])[0].tokens
            prompt = tokens.input_ids[: int(tokens.spans[0, 0])].tolist() if len(tokens.spans) else []
            if prompt and min(prompt) >= 0:
                prompts.append(prompt)
            if len(prompts) == wanted:
                break
        if not prompts:
            raise ConfigError("trainer.val_decode_prompts is set, and no validation sample has a prompt; set data.validation_ds.")
        target = load_target(section, ranks, data.layer_ids, final=True)
        check_rewindable(target.model)
        bundle = bundle_of(target).to(target.device, target.dtype)
        log.info("%d validation prompts are decoded with the target at each validation", len(prompts))
        stop_ids = stop_tokens(target.model, load_tokenizer(section))
        return cls(target, bundle, prompts[ranks.dp_rank :: ranks.dp_size], stop_ids, config.evaluate.max_new_tokens, ranks)

    def measure(self, draft: Draft, asked: Sequence[int] = ()) -> dict[str, float] | None:
        """val_served_accept_len of `draft` in the target's dtype: Σ tokens / Σ steps over all prompts. Every rank must call it; `asked` as
        in `validate`."""
        copy = joined(served_copy(draft, self.target.dtype))
        sums = torch.zeros(3, dtype=torch.float64, device=self.ranks.device)
        for prompt in self.prompts:
            if given_up(asked, self.ranks):
                break
            lengths = speculative_decode(self.target.model, copy, self.bundle, prompt, self.max_new_tokens, self.stop_ids).step_lengths
            sums[:2] += torch.tensor((sum(lengths), len(lengths)), device=sums.device)
        sums[2] = given_up(asked, self.ranks)
        tokens, steps, stopped = reduce_sums(sums, self.ranks).tolist()
        if stopped:
            return None
        return {"val_served_accept_len": tokens / steps} if steps else {}
