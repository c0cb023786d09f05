import pytest

from pipeline.config.fields import all_fields, describe_fields, unknown_part
from pipeline.config.schema import Config


def test_help_names_every_leaf_with_type_default_and_meaning() -> None:
    text = describe_fields()
    lines = {line.split(":")[0].strip(): line for line in text.splitlines()}

    def leaves(value: object, prefix: str = "") -> list[str]:
        return [p for k, v in value.items() for p in leaves(v, f"{prefix}{k}.")] if isinstance(value, dict) and value else [prefix[:-1]]

    assert set(leaves(Config().model_dump())) <= set(lines)
    assert "int >= 1 = 4096 " in lines["data.max_tokens"]
    assert "tokens of a sample" in lines["data.max_tokens"]
    assert "bfloat16 | float16 | float32 = bfloat16" in lines["model.target.dtype"]
    assert "int >= 1 | null = null" in lines["trainer.max_steps"]
    assert "float >= 0 and < 1" in lines["data.validation_ds.fraction"]
    assert "list of int | null" in lines["model.target.layer_ids"]
    assert "str = required" in lines["data.train_ds.input_cfg.*.path"]
    assert "data.validation_ds.datasets.*.input_cfg.*.path" in lines


@pytest.mark.parametrize(
    "path", ["model.target.path", "data.validation_ds.datasets.any.input_cfg.3.path", "model.target.layer_ids.0", "trainer"]
)
def test_paths_that_the_schema_has(path: str) -> None:
    assert unknown_part(path.split(".")) is None


def test_every_field_is_found_by_its_own_path() -> None:
    for path, _ in all_fields():
        assert unknown_part(path.replace("*", "0").split(".")) is None
