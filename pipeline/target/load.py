"""The frozen target, no deeper than it has to be, on one device or spread over the ranks of a tensor-parallel group.

transformers loads and shards; this module cuts. A model class of the moment derives from the target's own class and, once the
modules exist (without storage yet) and before any weight is read, drops the layers above the deepest captured one and whatever
is neither decoder nor head (the vision tower of a wrapper). The config stays whole, so that per-layer lists keep their meaning.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.distributed import DistributedConfig
from transformers.distributed.utils import TransformersDeviceMesh
from transformers.utils.logging import disable_progress_bar

from pipeline.config.schema import TargetSection
from pipeline.errors import TargetError
from pipeline.runtime.ranks import Ranks
from pipeline.target.folder import read_config, target_folder, weight_files
from pipeline.target.layers import check_layer_ids

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Target:
    """A frozen target. `model` is transformers' causal model, `decoder` the stack of layers inside it, `norm` its final norm.

    `num_layers` counts the layers of the whole target, `layer_ids` are those captured; `config` is the whole config's text part.
    With `final` all layers are there; otherwise layers 0..max(layer_ids).
    """

    model: Any
    decoder: Any
    norm: nn.Module
    layer_ids: tuple[int, ...]
    final: bool
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_positions: int | None
    dtype: torch.dtype
    device: torch.device
    attn_implementation: str
    config: dict[str, Any]


def load_target(section: TargetSection, ranks: Ranks, layer_ids: Sequence[int], final: bool) -> Target:
    """Load `section.path` for capturing `layer_ids` and, with `final`, the state before the final norm.

    With `section.tp_size` > 1 every rank of the world must call this. Raises `TargetError` for a target that is missing, incomplete,
    in another dtype than asked for, or that tensor parallelism cannot divide (before weights are read).
    """
    folder = target_folder(section.path, section.revision)
    weight_files(folder)
    config = read_config(section)
    text = config.get_text_config(decoder=True)
    ids = check_layer_ids(layer_ids, text.num_hidden_layers)
    if section.tp_size != ranks.tp_size:
        raise TargetError(f"model.target.tp_size is {section.tp_size}, and the ranks were started for {ranks.tp_size}.")
    if section.tp_size > 1:
        check_tp(text, section.tp_size, str(section.path))
    if not ranks.is_main:
        disable_progress_bar()
    depth = text.num_hidden_layers if final else max(ids) + 1
    kwargs: dict[str, Any] = {"distributed_config": DistributedConfig(tp_size=ranks.tp_size)} if ranks.tp_size > 1 else {}
    if ranks.tp_size == 1 and ranks.device.type != "cpu":
        kwargs["device_map"] = {"": ranks.device}
    try:
        model_class = _cut_class(_model_class(config, section), depth, ranks)
        model, info = model_class.from_pretrained(
            folder,
            config=config,
            dtype=DTYPES[section.dtype],
            attn_implementation=section.attn_implementation,
            trust_remote_code=section.trust_remote_code,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            **kwargs,
        )
    except torch.OutOfMemoryError as error:
        raise TargetError(f"target {section.path} does not fit on {ranks.device}: raise model.target.tp_size. ({error})") from error
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        hint = " Set model.target.attn_implementation=eager." if "attn_implementation=" in str(error) else ""
        raise TargetError(f"target {section.path} cannot be loaded as {type(config).__name__}: {error}{hint}") from error
    if missing := sorted(info["missing_keys"]):
        raise TargetError(
            f"target {section.path} lacks {len(missing)} weights, among them {missing[:4]}; transformers would have made them up. "
            f"Check that config.json and the safetensors belong together."
        )
    model.requires_grad_(False).eval()
    return _target(model, section, ranks.device, ids, final)


def check_tp(text: Any, tp_size: int, path: str) -> None:
    """Raise `TargetError` unless transformers has a plan for this config and `tp_size` divides its attention heads."""
    plan = text.base_model_tp_plan
    if not plan:
        raise TargetError(f"transformers has no tensor-parallel plan for {path} ({text.model_type}). Set model.target.tp_size=1.")
    if not any("attn" in rule for rule in plan):
        return
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(text, name, None)
        if isinstance(heads, int) and heads % tp_size:
            raise TargetError(
                f"model.target.tp_size={tp_size} does not divide the {heads} {name} of {path}. "
                f"Possible sizes: {[size for size in range(1, heads + 1) if _divides(text, size)]}."
            )


def _divides(text: Any, size: int) -> bool:
    heads, kv_heads = text.num_attention_heads, getattr(text, "num_key_value_heads", None)
    return heads % size == 0 and (not isinstance(kv_heads, int) or kv_heads % size == 0)


def _model_class(config: Any, section: TargetSection) -> type[Any]:
    """The class that transformers' auto classes choose, wrappers of text decoders included."""
    refusal: ValueError | None = None
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        try:
            with torch.device("meta"):
                return type(auto.from_config(config, trust_remote_code=section.trust_remote_code))
        except ValueError as error:
            refusal = refusal or error
    raise TargetError(f"target {section.path} is not a model that generates text: {refusal}")


def _cut_class(model_class: type[Any], depth: int, ranks: Ranks) -> type[Any]:
    """A subclass of `model_class` with the first `depth` decoder layers only, and with a mesh of dp x tp where tp > 1."""

    class Cut(model_class):
        _keys_to_ignore_on_load_unexpected = (r".",)  # what was cut is in the files; what is missing is an error, see above

        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            super().__init__(config, *args, **kwargs)
            decoder = self.get_decoder()
            if not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
                raise TargetError(f"{model_class.__name__} keeps its decoder layers where they are not found; it cannot be captured.")
            decoder.layers = decoder.layers[:depth]
            _keep_only(self, {decoder, self.get_output_embeddings()})

        @classmethod
        def prepare_distribute_model(cls, distributed_config: Any, device_map: Any = None) -> tuple[Any, Any, Any]:
            # transformers wants the world to be one group; here it is data-parallel groups that share nothing.
            if distributed_config is None:
                return None, device_map, None
            return distributed_config, ranks.device, _mesh(ranks)

    Cut.__name__, Cut.__qualname__, Cut.__module__ = model_class.__name__, model_class.__qualname__, model_class.__module__
    return Cut


def _keep_only(module: nn.Module, kept: set[nn.Module]) -> None:
    """Remove what is neither one of `kept`, nor inside one, nor around one."""
    for name, child in list(module.named_children()):
        if child in kept:
            continue
        if kept.isdisjoint(child.modules()):
            delattr(module, name)
        else:
            _keep_only(child, kept)


def _mesh(ranks: Ranks) -> Any:
    """transformers' view of this rank's tensor-parallel group, out of one mesh over the world; every rank must call it."""
    names = ("dp", "pp", "dp_replicate", "fsdp", "tp")
    world = init_device_mesh(ranks.device.type, (ranks.dp_size, 1, 1, 1, ranks.tp_size), mesh_dim_names=names)
    group = world[names[1:]]
    return TransformersDeviceMesh(group, group)


def _target(model: Any, section: TargetSection, device: torch.device, layer_ids: tuple[int, ...], final: bool) -> Target:
    text, dtype, decoder = model.config.get_text_config(decoder=True), DTYPES[section.dtype], model.get_decoder()
    embedding = model.get_input_embeddings().weight
    if embedding.dtype != dtype:
        raise TargetError(f"target {section.path} was loaded as {embedding.dtype}, and model.target.dtype asks for {dtype}.")
    config = text.to_dict()
    for name in ("_name_or_path", "distributed_config", "transformers_version"):
        config.pop(name, None)
    config["architectures"] = list(model.config.architectures or ())
    return Target(
        model=model,
        decoder=decoder,
        norm=_final_norm(decoder, str(section.path)),
        layer_ids=layer_ids,
        final=final,
        num_layers=text.num_hidden_layers,
        hidden_size=text.hidden_size,
        vocab_size=embedding.shape[0],
        max_positions=getattr(text, "max_position_embeddings", None),
        dtype=dtype,
        device=device,
        attn_implementation=section.attn_implementation,
        config=config,
    )


def _final_norm(decoder: nn.Module, path: str) -> nn.Module:
    for name in ("norm", "final_layernorm", "final_layer_norm", "ln_f", "norm_f"):
        if isinstance(module := getattr(decoder, name, None), nn.Module):
            return module
    raise TargetError(f"the decoder of target {path} ({type(decoder).__name__}) has no final norm under a known name.")
