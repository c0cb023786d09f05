"""What serving gives: target and draft decode prompts together, next to the target alone.

Both decode greedily, so both must write the same tokens: in float32 exactly; in bfloat16 a verified block rounds otherwise
than single tokens do, and where two tokens are nearly equal the answers can part. Such prompts are counted and named.
At a temperature, answers are drawn as well: those have no tokens to agree on, and are asked only how much of each block was kept.
"""

import json
import logging
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from pipeline.config.schema import Config, EvaluateSection, ObjectiveSection
from pipeline.corpus.chat import load_tokenizer, prompt_ids, read_template
from pipeline.corpus.rows import Message
from pipeline.corpus.sources import read_rows
from pipeline.corpus.turns import Template
from pipeline.decode.sampling import Request, sampler_for, speculative_sample
from pipeline.decode.speculative import check_rewindable, greedy_decode, speculative_decode
from pipeline.draft.export import load_draft
from pipeline.draft.model import Draft, joined
from pipeline.errors import CorpusError
from pipeline.records import TargetBundle, TokenSample
from pipeline.report.plots import plot_served
from pipeline.report.tables import table
from pipeline.runtime.files import atomic_file, write_json
from pipeline.runtime.logs import Progress
from pipeline.runtime.ranks import Ranks
from pipeline.target.forward import forward_hidden
from pipeline.target.head import bundle_of
from pipeline.target.load import Target, load_target
from pipeline.train.evaluate import score
from pipeline.train.identity import check_target

log = logging.getLogger(__name__)

EVALUATION, PROMPTS = "evaluation.json", "evaluation_prompts.jsonl"
PARTIAL = ObjectiveSection(anchor_fit="partial")


@dataclass(frozen=True, slots=True)
class Prompt:
    """`ids` of a chat up to its last user turn, with the generation prompt behind it; `name` says which row of which file it was."""

    name: str
    ids: list[int]


@dataclass(frozen=True, slots=True)
class Served:
    """One prompt, decoded both ways. `step_lengths`: tokens committed by each step; `walk_lengths`: what the walk of DFLASH §4 predicts;
    `sampled_lengths`: as the first, of an answer drawn at a temperature, if one was."""

    name: str
    prompt_tokens: int
    plain_ids: list[int]
    served_ids: list[int]
    step_lengths: list[int]
    walk_lengths: list[int]
    plain_seconds: float
    served_seconds: float
    sampled_lengths: list[int]


@dataclass(frozen=True)
class Pair:
    """Target, draft, and what decoding needs of both, on one device in one dtype."""

    target: Target
    draft: Draft
    bundle: TargetBundle
    stop_ids: tuple[int, ...]
    max_new_tokens: int
    sampling: EvaluateSection

    def serve(self, prompt: Prompt) -> Served:
        begin = time.perf_counter()
        plain = greedy_decode(self.target.model, prompt.ids, self.max_new_tokens, self.stop_ids)
        middle = time.perf_counter()
        served = speculative_decode(self.target.model, self.draft, self.bundle, prompt.ids, self.max_new_tokens, self.stop_ids)
        end = time.perf_counter()
        walk = self.walk(prompt, served.ids)
        seconds, sampled = (middle - begin, end - middle), self.sample(prompt)
        return Served(prompt.name, len(prompt.ids), plain.ids, served.ids, served.step_lengths, walk, *seconds, sampled)

    def sample(self, prompt: Prompt) -> list[int]:
        """Step lengths of an answer that is drawn; none at temperature 0."""
        how = self.sampling
        if how.temperature == 0:
            return []
        sampler = sampler_for(how.temperature, how.top_p, how.seed, prompt.name, self.target.device)
        request = Request(prompt.ids, self.max_new_tokens, self.stop_ids)
        return speculative_sample(self.target.model, self.draft, self.bundle, request, sampler)[0].step_lengths

    def walk(self, prompt: Prompt, answer: Sequence[int]) -> list[int]:
        """Step lengths for `answer` without decoding it: one forward of the target, all blocks of the draft at once."""
        span = np.array([[len(prompt.ids), len(answer)]], dtype=np.int32)
        sample = TokenSample(prompt.name, prompt.name, 0, "train", np.array([*prompt.ids, *answer], dtype=np.int32), span)
        with torch.no_grad():
            return score(self.draft, self.bundle, PARTIAL, forward_hidden(self.target, [sample])[0])[1]


def evaluate(config: Config, ranks: Ranks) -> dict[str, Any]:
    """Decode the prompts of `config.evaluate` with target and draft, on the data-parallel ranks side by side.

    Writes `evaluation.json`, `evaluation_prompts.jsonl` and `served.png` into the run's folder and returns what the first
    holds. Raises `CorpusError` when no row gives a prompt, `TargetError` and `DraftError` for a pair that cannot decode together.
    """
    section, folder = config.evaluate, Path(config.log_dir)
    prompts, left_out = read_prompts(section, read_template(load_tokenizer(config.model.target), config.model.target.chat_template_kwargs))
    pair = load_pair(config, ranks)
    mine = prompts[ranks.dp_rank :: ranks.dp_size]
    if mine:
        replace(pair, max_new_tokens=8).serve(mine[0])  # the first decoding pays for kernels and buffers; it is not to be timed
    served = []
    with Progress(len(mine), "prompts", "decoding", ranks.is_main) as progress:
        for prompt in mine:
            served.append(pair.serve(prompt))
            progress.advance(1)
    everyone: list[list[Served]] = [served]
    if ranks.world_size > 1:
        everyone = [[] for _ in range(ranks.world_size)]
        dist.all_gather_object(everyone, served)
        everyone = everyone[:: ranks.tp_size]
    names = {prompt.name: place for place, prompt in enumerate(prompts)}
    found = sorted((one for rank in everyone for one in rank), key=lambda one: names[one.name])
    result = summarise(found, config.model.target.dtype) | {"prompts_left_out": left_out}
    if section.temperature:
        result["sampling"] = {"temperature": section.temperature, "top_p": section.top_p, "seed": section.seed}
    if ranks.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / EVALUATION, result)
        with atomic_file(folder / PROMPTS) as stream:
            stream.write("".join(json.dumps(_described(one)) + "\n" for one in found).encode())
        lengths = {int(length): steps for length, steps in result["step_length_histogram"].items()}
        mean = result["served_acceptance_length"]
        title = "no steps, every answer is one token" if mean is None else f"{mean:.3f} tokens a step"
        plot_served(lengths, folder / "served.png", f"{config.name}: {title}")
        log.info("%s\n%s", folder / EVALUATION, _shown(result))
    return result


def load_pair(config: Config, ranks: Ranks) -> Pair:
    """The whole target, and the exported draft in its dtype. Every rank must call it."""
    section = config.model.target
    folder = Path(config.evaluate.draft or f"{config.log_dir}/export").expanduser()
    draft = load_draft(folder)
    check_target(section, folder)
    target = load_target(section, ranks, draft.config.target_layer_ids, final=True)
    check_rewindable(target.model)
    return Pair(
        target=target,
        draft=joined(draft.to(target.device, target.dtype)),
        bundle=bundle_of(target).to(target.device, target.dtype),
        stop_ids=stop_tokens(target.model, load_tokenizer(section)),
        max_new_tokens=config.evaluate.max_new_tokens,
        sampling=config.evaluate,
    )


def stop_tokens(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """Ids that end an answer: those of the model's generation config, and the tokenizer's own."""
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]
    return tuple(sorted({end for end in (*ends, tokenizer.eos_token_id) if end is not None}))


def read_prompts(section: EvaluateSection, template: Template) -> tuple[list[Prompt], dict[str, int]]:
    """The prompts of `section.input_cfg`, at most `max_prompts`, and how many rows gave none, by reason."""
    prompts: list[Prompt] = []
    left_out: Counter[str] = Counter()
    for row in read_rows(section.input_cfg):
        if section.max_prompts is not None and len(prompts) == section.max_prompts:
            break
        if row.messages is None:
            left_out[row.unusable.reason if row.unusable else "no messages"] += 1
        elif (question := _up_to_last_user(row.messages)) is None:
            left_out["no user turn"] += 1
        else:
            prompts.append(Prompt(f"{row.source}/{row.row}", prompt_ids(template, question, row.tools).tolist()))
    if not prompts:
        raise CorpusError(
            f"evaluate.input_cfg holds no prompt: {dict(left_out) or 'its files are empty'}. Expected chats with a user turn."
        )
    return prompts, dict(left_out)


def _up_to_last_user(messages: Sequence[Message]) -> list[Message] | None:
    users = [place for place, message in enumerate(messages) if message["role"] == "user"]
    return list(messages[: users[-1] + 1]) if users else None


def summarise(served: Sequence[Served], dtype: str) -> dict[str, Any]:
    """Figures over all prompts, from sums. Rates count new tokens over the time of whole decodings, prefill included."""
    steps = [length for one in served for length in one.step_lengths]
    walk = [length for one in served for length in one.walk_lengths]
    sampled = [length for one in served for length in one.sampled_lengths]
    different = [one.name for one in served if one.plain_ids != one.served_ids]
    plain_tokens, served_tokens = sum(len(one.plain_ids) for one in served), sum(len(one.served_ids) for one in served)
    plain_rate = plain_tokens / sum(one.plain_seconds for one in served)
    served_rate = served_tokens / sum(one.served_seconds for one in served)
    return {
        "num_prompts": len(served),
        "new_tokens": served_tokens,
        "dtype": dtype,
        "served_acceptance_length": sum(steps) / len(steps) if steps else None,
        "walk_accept_len": sum(walk) / len(walk) if walk else None,
        "sampled_acceptance_length": sum(sampled) / len(sampled) if sampled else None,
        "prompts_whose_walk_equals_serving": sum(one.walk_lengths == one.step_lengths for one in served),
        "step_length_histogram": {str(length): count for length, count in sorted(Counter(steps).items())},
        "lossless": not different,
        "prompts_that_differ": different,
        "tokens_per_second_plain": plain_rate,
        "tokens_per_second_served": served_rate,
        "speedup": served_rate / plain_rate,
    }


def _described(one: Served) -> dict[str, Any]:
    parts = next((k for k, (a, b) in enumerate(zip(one.plain_ids, one.served_ids, strict=False)) if a != b), None)
    return {
        "name": one.name,
        "prompt_tokens": one.prompt_tokens,
        "new_tokens": len(one.served_ids),
        "step_lengths": one.step_lengths,
        "walk_lengths": one.walk_lengths,
        "sampled_lengths": one.sampled_lengths,
        "first_different_token": parts,
    }


def _shown(result: dict[str, Any]) -> str:
    """The table and the plain sentence about losslessness."""
    names = (
        "served_acceptance_length",
        "walk_accept_len",
        "sampled_acceptance_length",
        "tokens_per_second_plain",
        "tokens_per_second_served",
        "speedup",
    )
    rows = [[name.replace("_", " "), result[name]] for name in names if result[name] is not None]
    if how := result.get("sampling"):
        rows = [[f"{name} (temperature {how['temperature']}, top-p {how['top_p']})" if "sampled" in name else name, v] for name, v in rows]
    different, count = len(result["prompts_that_differ"]), result["num_prompts"]
    if not different:
        verdict = f"lossless: all {count} answers are the target's own, token by token ({result['dtype']})"
    elif result["dtype"] == "float32":
        verdict = f"NOT lossless: {different} of {count} answers differ from the target's own in float32, which is a fault"
    else:
        verdict = (
            f"{different} of {count} answers differ from the target's own in {result['dtype']}: near ties, rounded otherwise in blocks"
        )
    walk = f"the walk predicts every step of {result['prompts_whose_walk_equals_serving']} of {count} answers"
    return f"{table(['measure', 'value'], rows)}\n{walk}\n{verdict}"
