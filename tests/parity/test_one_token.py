"""One tagged token, from the text of a chat to the gradient: its id and the bits of its states are the same at every hop."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pipeline.cache.reader import Cache
from pipeline.capture.run import capture
from pipeline.config.schema import Config
from pipeline.corpus.prepare import open_prepared
from pipeline.draft.batch import BatchShape, collate
from pipeline.draft.loss import block_ids, block_labels, objective
from pipeline.draft.model import Draft, DraftConfig
from pipeline.records import DraftBatch
from pipeline.runtime.ranks import start_ranks
from tests.support.tiny import MASK_TOKEN_ID
from tests.support.training import config

LAYERS = (1, 4)


def test_a_token_keeps_its_id_and_its_bits(tiny_target: Path, tmp_path: Path) -> None:
    question, answer = "What is the colour of the sea?", "The sea is blue, and under clouds it is grey."
    chat = {"id": "tagged", "messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat) + "\n")
    settings = {"model__target__layer_ids": LAYERS, "capture__batch_tokens": 1, "data__validation_ds": {"fraction": 0.0}}
    run = config(tmp_path, tiny_target, tmp_path / "chats.jsonl", **settings)
    capture(run, start_ranks(1, None, 1))

    # Text: the tagged token is one in the middle of the answer, found without our code.
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    text = tokenizer.apply_chat_template(chat["messages"], tokenize=False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    begin = text.index(answer)
    tagged = next(i for i, (start, _) in enumerate(encoded["offset_mapping"]) if start >= begin + len(answer) // 2)
    token = encoded["input_ids"][tagged]

    # Prepared corpus.
    corpus = open_prepared(run)
    assert corpus is not None
    sample = corpus.sample(0)
    assert sample.sample_id == "tagged"
    assert sample.input_ids[tagged] == token
    assert sample.loss_mask[tagged]

    # Target: transformers' own forward. Cache: the same bits.
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    with torch.no_grad():
        states = model(torch.tensor([encoded["input_ids"]]), output_hidden_states=True).hidden_states
    cache = Cache.open(tmp_path / "cache")
    captured = cache.read(0, LAYERS)
    for layer in LAYERS:
        assert torch.equal(captured.features((layer,))[tagged], states[layer + 1][0, tagged])

    # Batch: two blocks, one with the tagged token as its slot 2, one that starts behind it and reads its state.
    shape = BatchShape(LAYERS, block_size=4, hidden_size=64, dtype=torch.float32)
    anchors = np.array([tagged - 2, tagged + 1])
    batch = collate([captured], [anchors], shape).check()
    assert batch.input_ids[0, tagged] == token
    assert torch.equal(batch.features[0, tagged], torch.cat([states[layer + 1][0, tagged] for layer in LAYERS]))

    _reaches_the_gradient(run, cache, batch, tagged)


def _reaches_the_gradient(run: Config, cache: Cache, batch: DraftBatch, tagged: int) -> None:
    """Draft and objective: the tagged token is fed as a mask, wanted as a label, and seen as context by the later block alone."""
    torch.manual_seed(0)
    bundle, token = cache.bundle(), int(batch.input_ids[0, tagged])
    draft = Draft(DraftConfig.build(run.model.draft, bundle, LAYERS, {}))
    assert block_ids(batch, draft.config)[0, 0].tolist() == [int(batch.input_ids[0, tagged - 2]), *[MASK_TOKEN_ID] * 3]
    labels, supervised = block_labels(batch, 4)
    assert labels[0, 0, 2] == token
    assert supervised[0, 0, 2]
    features = batch.features.clone().requires_grad_()
    for block, sees in ((0, False), (1, True)):
        alone = replace(batch, features=features, block_valid=torch.arange(2)[None] == block)
        (gradient,) = torch.autograd.grad(objective(draft, bundle, alone, run.model.objective).numerator, features)
        assert bool(gradient[0, tagged].any()) is sees
    # The gradient of the weights: it is another one once the label is another token.
    gradients = []
    for label in (token, token + 1):
        ids = batch.input_ids.clone()
        ids[0, tagged] = label
        first = replace(batch, input_ids=ids, block_valid=torch.arange(2)[None] == 0)
        objective(draft, bundle, first, run.model.objective).numerator.backward()  # type: ignore[no-untyped-call]
        assert draft.fc.weight.grad is not None
        gradients.append(draft.fc.weight.grad.clone())
        draft.zero_grad()
    assert not torch.equal(*gradients)
