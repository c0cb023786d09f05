"""Two small caches of format version 1, one a codec, with the values that they hold: `python -m tests.support.v1_caches FOLDER`.

Those in tests/data were written once, when the format was settled. They are not written again: whatever the pipeline becomes, it
must read them. A change that cannot needs a new format version, and files of its own.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from pipeline.cache.bundle import save_bundle
from pipeline.cache.commit import commit_shard, complete
from pipeline.cache.layout import target_folder, tokenizer_folder
from pipeline.cache.manifest import Manifest, create_or_compare
from pipeline.cache.reader import Cache
from pipeline.cache.writer import ShardWriter
from pipeline.records import CapturedSample, TargetBundle, TokenSample

HIDDEN, VOCAB = 4, 12
CACHES: dict[str, dict[str, Any]] = {
    "lossless": {
        "layer_ids": (3, 1),
        "dtype": "bfloat16",
        "final": True,
        "segments": (((0, 2), (3, 4)), ((2, 3),)),
        "shards": ((5, 9), (2,), (7,)),
    },
    "raw": {"layer_ids": (2,), "dtype": "float16", "final": False, "segments": None, "shards": ((3, 6),)},
}


def _sample(name: str, row: int, length: int, settings: dict[str, Any]) -> CapturedSample:
    generator = torch.Generator().manual_seed(100 * len(name) + row)
    ids = torch.randint(0, VOCAB - 1, (length,), generator=generator, dtype=torch.int32).numpy()
    ids[0] = -1 if row == 1 else ids[0]  # fed as an embedding
    spans = np.array([[0, 1], [length - 1, 1]] if length > 4 else [[length - 1, 1]], np.int32)
    kind = getattr(torch, settings["dtype"])
    hidden = {layer: (torch.randn(length, HIDDEN, generator=generator) * 10 ** (layer - 2)).to(kind) for layer in settings["layer_ids"]}
    final = torch.randn(length, HIDDEN, generator=generator).to(kind) if settings["final"] else None
    split = "heldout" if row == 1 else "train"
    return CapturedSample(TokenSample(f"chat-{row} é", "chats.jsonl", row, split, ids, spans), hidden, final)


def write(folder: Path, codec: str) -> None:
    settings = CACHES[codec]
    manifest = Manifest(
        states_identity={"target": {"architecture": "None", "weights_digest": "0" * 8}, "max_tokens": 16, "token_ids": "1" * 8},
        samples_identity={"mask_rules": 1, "heldout_fraction": 0.1},
        hidden_size=HIDDEN,
        codec=codec,
        num_shards=len(settings["shards"]),
        **{name: settings[name] for name in ("layer_ids", "dtype", "final", "segments")},
    )
    cache = folder / codec
    create_or_compare(cache, manifest)
    embedding = torch.arange(VOCAB * HIDDEN, dtype=torch.float32).reshape(VOCAB, HIDDEN)
    head = embedding if codec == "raw" else embedding + 0.5
    config = {"hidden_size": HIDDEN, "model_type": "qwen3"}
    save_bundle(target_folder(cache), TargetBundle(embedding, head, torch.ones(HIDDEN), config, final_logit_softcapping=30.0))
    tokenizer_folder(cache).mkdir()
    (tokenizer_folder(cache) / "tokenizer.json").write_text("{}\n")
    row = 0
    for shard, lengths in enumerate(settings["shards"]):
        samples = [_sample(codec, row + i, length, settings) for i, length in enumerate(lengths)]
        row += len(lengths)
        with ShardWriter(cache, shard, manifest, manifest.arrays) as writer:
            for sample in samples:
                writer.append(sample)
            records = writer.close()
        commit_shard(cache, shard, [sample.tokens for sample in samples], records)
    complete(cache)
    (folder / f"{codec}.json").write_text(json.dumps(contents(cache), indent=1, ensure_ascii=False) + "\n")


def contents(path: Path) -> dict[str, Any]:
    """All that the cache at `path` holds, states as the numbers of their bits, for a comparison that knows nothing of formats."""
    cache = Cache.open(path)
    samples = []
    for i in range(len(cache)):
        sample = cache.read(i, final=cache.manifest.final)
        states = {str(layer): state for layer, state in sample.hidden.items()} | ({} if sample.final is None else {"final": sample.final})
        samples.append(
            {
                "sample_id": sample.tokens.sample_id,
                "source": sample.tokens.source,
                "row": sample.tokens.row,
                "split": sample.tokens.split,
                "input_ids": sample.tokens.input_ids.tolist(),
                "spans": sample.tokens.spans.tolist(),
                "bits": {name: state.view(torch.int16).tolist() for name, state in states.items()},
            }
        )
    bundle, totals = cache.bundle(), cache.manifest.totals
    assert totals is not None
    return {
        "digest": cache.digest(),
        "layer_ids": list(cache.manifest.layer_ids),
        "dtype": cache.manifest.dtype,
        "segments": json.loads(json.dumps(cache.manifest.segments)),
        "totals": totals.model_dump(),
        "states_identity": cache.manifest.states_identity,
        "samples_identity": cache.manifest.samples_identity,
        "used_token_ids": np.flatnonzero(cache.index.used_token_ids).tolist(),
        "embedding": bundle.embedding.tolist(),
        "head": bundle.head.tolist(),
        "final_logit_softcapping": bundle.final_logit_softcapping,
        "samples": samples,
    }


if __name__ == "__main__":
    for name in CACHES:
        write(Path(sys.argv[1]), name)
