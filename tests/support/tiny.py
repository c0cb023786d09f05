"""A target of a few hundred kilobytes: a random Qwen3 and a byte-level BPE tokenizer trained on the text below.

The embedding has 512 rows and the tokenizer fewer ids, as published models do, so that spare rows exist for the mask token.
Everything is a function of its arguments; nothing is fetched.
"""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
THINK = ("<think>", "</think>")
MASK_TOKEN_ID = 511  # the last row of the embedding; the tokenizer never emits it
TOKENIZER_LENGTH = 480

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

# Behaves as Qwen3's does: thinking is kept in answers after the last user turn and dropped from earlier ones, the last
# answer always carries a think block, and `enable_thinking=false` puts an empty one into the generation prompt.
QWEN3_LIKE = """\
{%- set state = namespace(last_user=-1) -%}
{%- for message in messages -%}
  {%- if message.role == 'user' -%}{%- set state.last_user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
  {%- set text = message.content if message.content is string else '' -%}
  {%- if message.role != 'assistant' -%}
    {{- '<|im_start|>' + message.role + '\\n' + text + '<|im_end|>\\n' -}}
  {%- else -%}
    {%- set thought = '' -%}
    {%- if message.reasoning_content is string -%}
      {%- set thought = message.reasoning_content -%}
    {%- elif '</think>' in text -%}
      {%- set thought = text.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
      {%- set text = text.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if loop.index0 > state.last_user and (loop.last or thought) -%}
      {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' -}}
    {%- endif -%}
    {{- text + '<|im_end|>\\n' -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|im_start|>assistant\\n' -}}
  {%- if enable_thinking is defined and enable_thinking is false -%}{{- '<think>\\n\\n</think>\\n\\n' -}}{%- endif -%}
{%- endif -%}
"""

TEXT = """\
The kettle boils while the rain falls on the roof, and the cat sleeps near the warm stove. When the water is ready we make tea,
pour it into two cups and carry them to the table by the window. What would you like to hear about today?
A prime number has exactly two divisors. Two, three, five and seven are prime; four, six, eight and nine are not.
Write a function that returns the sum of a list of numbers. Here is one way to write it in Python:
def total(numbers):
    result = 0
    for number in numbers:
        result += number
    return result
Please rewrite the sentence so that it sounds more polite. Could you tell me where the station is, please?
Here are three ideas: first, walk to the river; second, read a book in the garden; third, cook soup for your friends.
The train leaves at seven in the morning and arrives before noon. The distance between the two towns is about 120 kilometres.
Why is the sky blue? Because air scatters short waves of light more than long ones, so blue reaches the eye from everywhere.
system user assistant You are a helpful assistant. I think that the answer is clear, so the user wants a short list.
"""


@dataclass(frozen=True)
class TinyShape:
    """Geometry of the target. `heads=3, kv_heads=3, hidden=48` gives one that only TP 3 divides."""

    layers: int = 8
    hidden: int = 64
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 128
    vocab: int = 512
    tied: bool = False


def build_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `TOKENIZER_LENGTH` ids with ChatML's special tokens and `template`."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=TOKENIZER_LENGTH - len(THINK),
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in THINK])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = template
    assert len(tokenizer) == TOKENIZER_LENGTH
    return tokenizer


def build_model(shape: TinyShape = TinyShape(), seed: int = 0) -> Qwen3ForCausalLM:
    """A random float32 target. Weights have about unit gain, so that states differ by token, by position and by layer."""
    config = Qwen3Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=shape.tied,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = Qwen3ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    return model


def write_target(folder: Path, *, shape: TinyShape = TinyShape(), seed: int = 0, template: str = CHATML) -> Path:
    """Write model (safetensors) and tokenizer as a folder that `from_pretrained` loads; returns `folder`."""
    build_model(shape, seed).save_pretrained(folder)
    build_tokenizer(template).save_pretrained(folder)
    return folder


def write_answering_target(folder: Path, *, template: str = CHATML) -> Path:
    """The same with a head that gives the end token more often, so that some of its answers end before a limit, and that never thinks."""
    write_target(folder, template=template)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"][2] *= 8
    weights["lm_head.weight"][TOKENIZER_LENGTH - len(THINK) :] = 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


OPENINGS = (
    "Tell me about the river",
    "What is {a} plus {b}?",
    "Write a function that adds {a} numbers",
    "Rewrite this sentence politely: give me tea",
    "List {a} ideas for a rainy day",
    "Why is the sky blue?",
    "Qu'est-ce que c'est, «thé»?",
    "それは何ですか 🙂",
)
WORDS = tuple(TEXT.replace("\n", " ").split(" "))
SYSTEMS = ("You are a helpful assistant.", "Answer briefly.")


def _answer(rng: random.Random) -> str:
    kind = rng.randrange(4)
    if kind == 0:
        return str(rng.randrange(1000))
    if kind == 1:
        return "\n".join(f"{i + 1}. {' '.join(rng.choices(WORDS, k=rng.randint(2, 6)))}" for i in range(rng.randint(2, 5)))
    if kind == 2:
        return f"```python\ndef total(numbers):\n    return sum(numbers) + {rng.randrange(10)}\n```\nIt returns a number."
    start = rng.randrange(len(WORDS) - 60)
    return " ".join(WORDS[start : start + rng.randint(5, 60)])


def chats(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """`n` rows `{"messages": [...]}` of one to four exchanges, some with a system message; lengths vary tenfold."""
    rng = random.Random(seed)
    rows = []
    for _ in range(n):
        messages = [{"role": "system", "content": rng.choice(SYSTEMS)}] if rng.random() < 0.4 else []
        for _ in range(rng.randint(1, 4)):
            question = rng.choice(OPENINGS).format(a=rng.randint(2, 9), b=rng.randint(2, 99))
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": _answer(rng)}]
        rows.append({"messages": messages})
    return rows


def write_jsonl(path: Path, rows: Iterable[Any]) -> Path:
    """One JSON value a line; returns `path`."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_chats(path: Path, n: int, seed: int = 0) -> Path:
    """`chats(n, seed)` as JSONL; returns `path`."""
    return write_jsonl(path, chats(n, seed))
