"""A cache from a stranger: its seals and checksums are right, its contents want to be executed, or to lead somewhere else."""

import json
import os
import pickle
import re
import shutil
from pathlib import Path

import pytest

from pipeline.cache.info import info
from pipeline.cache.manifest import FileRecord, read_manifest, read_marker, sealed_text
from pipeline.cache.reader import Cache
from pipeline.cache.verify import verify
from pipeline.config.load import load_config
from pipeline.errors import CacheCorruptError, CacheError, ConfigError
from pipeline.runtime.files import file_digest
from tests.support.launch import REPOSITORY


class _Payload:
    """Unpickling it makes a file."""

    def __init__(self, canary: Path) -> None:
        self._canary = canary

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self._canary),)


@pytest.fixture
def cache(small_cache: Path, tmp_path: Path) -> Path:
    return shutil.copytree(small_cache, tmp_path / "c")


def reseal(cache: Path) -> None:
    """Make every record say what is there now, as one can who is free to write a cache of his own."""
    manifest = read_manifest(cache)
    for shard in range(manifest.num_shards):
        folder, (marker, _) = cache / f"shards/{shard:05d}", read_marker(cache, shard)
        files = {name: FileRecord(size=(folder / name).stat().st_size, sha256=file_digest(folder / name)) for name in marker.files}
        (folder / "committed.json").write_bytes(sealed_text(marker.model_copy(update={"files": files})))
    target = {
        name: FileRecord(size=(cache / "target" / name).stat().st_size, sha256=file_digest(cache / "target" / name))
        for name in manifest.target_files or {}
    }
    index = FileRecord(size=(cache / "index.arrow").stat().st_size, sha256=file_digest(cache / "index.arrow"))
    (cache / "manifest.json").write_bytes(sealed_text(manifest.model_copy(update={"target_files": target, "index": index})))


def use(cache: Path) -> None:
    opened = Cache.open(cache)
    opened.bundle()
    assert opened.tokenizer_dir
    for i in range(len(opened)):
        opened.read(i)


@pytest.mark.parametrize(
    "name",
    [
        "index.arrow",
        "shards/00001/samples.arrow",
        "shards/00001/hidden.zarr/zarr.json",
        "shards/00001/hidden.zarr/layer_4/zarr.json",
        "shards/00001/hidden.zarr/layer_4/c/0/0",
        "target/bundle.safetensors",
        "target/bundle.json",
    ],
)
def test_a_pickle_in_the_place_of_a_file_is_not_unpickled(cache: Path, tmp_path: Path, name: str) -> None:
    payload = pickle.dumps(_Payload(tmp_path / "canary"))
    (cache / name).write_bytes(payload)
    reseal(cache)
    with pytest.raises(CacheError):
        use(cache)
    verify(cache, full=True)
    info(cache)
    assert not (tmp_path / "canary").exists()
    pickle.loads(payload)
    assert (tmp_path / "canary").exists()  # it would have been noticed


def test_nothing_in_the_pipeline_can_unpickle() -> None:
    forbidden = re.compile(
        r"\b(import pickle|from pickle|torch\.load\(|np\.load\(|allow_pickle|joblib|yaml\.load\(|yaml\.unsafe_load|eval\()"
    )
    for path in sorted((REPOSITORY / "pipeline").rglob("*.py")):
        if path.parent.name == "bench":
            continue  # it times torch.load, of weights alone, on files that it has just written
        # A DCP folder's index is a pickle: it goes through an unpickler that lets in descriptions of tensors alone, tested with its reader.
        allowed = ["import pickle"] if path.name == "initial.py" else []
        found = [line for line in path.read_text(encoding="utf-8").splitlines() if forbidden.search(line.replace("model.eval(", ""))]
        assert [line for line in found if ".eval()" not in line] == allowed, path


def test_a_configuration_kept_in_a_cache_is_plain_yaml(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(f"name: !!python/object/apply:os.mkdir ['{tmp_path / 'canary'}']\n")
    with pytest.raises(ConfigError):
        load_config("capture", str(tmp_path / "config.yaml"), [])
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("trust", [False, True])
def test_code_beside_the_tokenizer_is_not_run_whatever_the_configuration_trusts(tiny_target: Path, tmp_path: Path, trust: bool) -> None:
    from pipeline.capture.run import capture
    from pipeline.train.data import open_cache
    from tests.support.tiny import write_chats
    from tests.unit.capture.conftest import capture_config
    from tests.unit.target.conftest import lone_rank

    write_chats(tmp_path / "chats.jsonl", 4)
    settings = {"data__validation_ds": {"fraction": 0.0}, "model__draft__mask_token_id": 511, "model__target__trust_remote_code": trust}
    config = capture_config(tiny_target, tmp_path, **settings)
    capture(config, lone_rank())
    folder = tmp_path / "cache/target/tokenizer"
    value = json.loads((folder / "tokenizer_config.json").read_text()) | {"auto_map": {"AutoTokenizer": [None, "evil.Evil"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(value))
    code = f"import os\nos.mkdir({str(tmp_path / 'canary')!r})\nfrom transformers import PreTrainedTokenizerFast as Evil\n"
    (folder / "evil.py").write_text(code)
    reseal(tmp_path / "cache")
    values = config.model_dump()
    values["model"]["target"]["path"] = None
    data = open_cache(type(config).model_validate(values))
    assert data.special_ids["pad"] == 0
    data.source([0])
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", ["../../secret", "{root}/secret", "tokenizer/../../../secret", "tokenizer/link"])
def test_names_in_the_manifest(cache: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("x")
    (cache / "target/tokenizer/link").symlink_to(tmp_path / "secret")
    manifest = read_manifest(cache)
    record = FileRecord(size=1, sha256=file_digest(tmp_path / "secret"))
    files = {**(manifest.target_files or {}), name.format(root=tmp_path): record}
    (cache / "manifest.json").write_bytes(sealed_text(manifest.model_copy(update={"target_files": files})))
    with pytest.raises(CacheCorruptError, match="leads out of the cache"):
        Cache.open(cache)
    assert any("leads out of the cache" in fault.problem for fault in verify(cache))


@pytest.mark.parametrize("name", ["../../../secret", "hidden.zarr/../../../secret", "/etc/passwd"])
def test_names_in_a_marker(cache: Path, name: str) -> None:
    marker, _ = read_marker(cache, 1)
    files = {**marker.files, name: marker.files["samples.arrow"]}
    (cache / "shards/00001/committed.json").write_bytes(sealed_text(marker.model_copy(update={"files": files})))
    (cache / "index.arrow").unlink()
    with pytest.raises(CacheCorruptError, match=re.escape(f"{cache}/shards/00001/committed.json lists ")):
        Cache.open(cache)
    assert [fault.file for fault in verify(cache)] == ["shards/00001/committed.json"]


@pytest.mark.parametrize(
    "name", ["manifest.json", "index.arrow", "shards/00001/committed.json", "shards/00001/samples.arrow", "target/bundle.json"]
)
def test_files_that_are_links_out_of_the_cache(cache: Path, tmp_path: Path, name: str) -> None:
    (cache / name).rename(tmp_path / "outside")
    (cache / name).symlink_to(tmp_path / "outside")
    with pytest.raises(CacheError, match=r"leads out of the cache|not a plain file"):
        use(cache)
    assert name in {fault.file for fault in verify(cache)}
