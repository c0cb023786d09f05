"""What a cache says of itself: `manifest.json` of the whole, `committed.json` of each shard.

Both are sealed: they hold the sha256 of their own text without that line, so that an edited or damaged one is noticed
whatever byte was hit. The contents of the two identities are the caller's; here they are only kept and compared.
"""

import hashlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from pipeline.cache.layout import FORMAT_VERSION, MANIFEST, MARKER, ArraySpec, array_names, inside, shard_folder, shards_folder
from pipeline.errors import CacheCorruptError, CacheError, CacheMismatchError
from pipeline.runtime.files import atomic_file, sync_folder

SEAL = "sha256_of_the_rest"
ABSENT: JsonValue = "(absent)"


class Sealed(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class FileRecord(Sealed):
    """A file as it was written."""

    size: int = Field(ge=0, description="bytes")
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Totals(Sealed):
    """Counts over all shards of a complete cache."""

    samples: int = Field(ge=1)
    tokens: int = Field(ge=1)
    supervised: int = Field(ge=0, description="tokens under the loss mask")
    samples_by_split: dict[str, int]


class Manifest(Sealed):
    """What a cache holds and what it was captured from.

    `states_identity` names all that the hidden states depend on, `samples_identity` the mask rules, split and selection:
    a run that disagrees with either is refused. Nothing here depends on where the cache lies, when or where it was written.
    """

    format_version: Literal[1] = FORMAT_VERSION
    state: Literal["open", "remasking", "complete"] = Field(
        "open", description="open: shards or arrays are missing still; remasking: samples.arrow of some shards has the former masks still"
    )
    states_identity: dict[str, JsonValue]
    samples_identity: dict[str, JsonValue]
    layer_ids: tuple[int, ...] = Field(description="target layers, 0-based: id i is the output of decoder layer i")
    hidden_size: int = Field(ge=1)
    dtype: Literal["bfloat16", "float16", "float32"]
    codec: Literal["lossless", "raw", "int8", "int4"]
    final: bool = Field(description="whether the state before the target's final norm is kept, as the array `final`")
    num_shards: int = Field(ge=1)
    segments: tuple[tuple[tuple[int, int], ...], ...] | None = Field(
        None,
        description="once something was appended: the corpus samples [start, end) that the first capture and each append brought. "
        "Shards are those of the first segment, then of the next, …; a segment is divided by itself",
    )
    corpus: dict[str, JsonValue] | None = Field(
        None,
        description="account of the rows of the corpus: rows = kept + those dropped, by reason; the kept ones gave samples",
    )
    totals: Totals | None = Field(None, description="once complete")
    index: FileRecord | None = Field(None, description="index.arrow, once complete")
    index_content_sha256: str | None = Field(None, description="of what index.arrow says, whichever Arrow version writes it; once complete")
    target_files: dict[str, FileRecord] | None = Field(None, description="files under target/ by relative path, once complete")

    @property
    def arrays(self) -> tuple[str, ...]:
        """Names of the arrays of every shard."""
        return array_names(self.layer_ids, self.final)

    def digest(self, marker_sha256s: Sequence[str]) -> str:
        """sha256 of the identities and of all shards' markers, in their order."""
        identity = self.model_dump(mode="json", exclude=PROGRESS_FIELDS)
        return hashlib.sha256(canonical([identity, list(marker_sha256s)])).hexdigest()

    def spec(self, array: str) -> ArraySpec:
        return ArraySpec(array, self.hidden_size, self.dtype, self.codec)


class ShardMarker(Sealed):
    """Written last into a shard; a shard without it does not exist."""

    format_version: Literal[1] = FORMAT_VERSION
    shard: int = Field(ge=0)
    num_samples: int = Field(ge=1)
    num_tokens: int = Field(ge=1)
    num_supervised: int = Field(ge=0)
    files: dict[str, FileRecord] = Field(description="all other files of the shard, by path inside it")


Model = TypeVar("Model", bound=Sealed)


def canonical(value: object) -> bytes:
    """One spelling for equal JSON values, for hashing."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def sealed_text(model: Sealed) -> bytes:
    """The file's text: indented JSON with sorted keys and its seal."""
    value = model.model_dump(mode="json")
    return _text({**value, SEAL: hashlib.sha256(_text(value)).hexdigest()})


def _text(value: object) -> bytes:
    return (json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False, indent=1) + "\n").encode()


def parse_sealed(model: type[Model], data: bytes, path: Path) -> Model:
    """The model in a sealed file's text; `CacheCorruptError` if a byte of it was changed after it was written."""
    try:
        value = json.loads(data)
        seal = value.pop(SEAL)
        version = value.get("format_version")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CacheCorruptError(f"{path} is damaged: no sealed JSON object ({error!r}).") from error
    if hashlib.sha256(_text(value)).hexdigest() != seal or _text({**value, SEAL: seal}) != data:
        raise CacheCorruptError(
            f"{path} was edited or damaged after it was written: its seal does not match. Restore it, or capture again."
        )
    if version != FORMAT_VERSION:
        raise CacheError(
            f"{path} has format version {version}; this pipeline reads version {FORMAT_VERSION}. Use the version that wrote it."
        )
    try:
        return model.model_validate_json(json.dumps(value))
    except ValidationError as error:
        raise CacheCorruptError(f"{path} does not hold what a version {FORMAT_VERSION} file must: {error}") from error


def read_manifest(cache: Path) -> Manifest:
    """The manifest of `cache`; a missing one is an error that says whether shards lie there."""
    path = inside(cache, cache / MANIFEST)
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        if any(shards_folder(cache).glob(f"[0-9]*/{MARKER}")):
            raise CacheCorruptError(
                f"{path} is missing, though committed shards lie beside it. Restore it, or capture into another folder."
            ) from error
        raise CacheError(f"{path} does not exist: {cache} is not a cache. Capture first, or name the right folder.") from error
    return parse_sealed(Manifest, data, path)


def write_manifest(cache: Path, manifest: Manifest) -> None:
    """Replace the manifest in one step."""
    with atomic_file(cache / MANIFEST) as file:
        file.write(sealed_text(manifest))


def read_marker(cache: Path, shard: int) -> tuple[ShardMarker, bytes]:
    """A shard's marker and the bytes it was read from; `CacheCorruptError` if it is missing, damaged or another shard's."""
    path = shard_folder(cache, shard) / MARKER
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise CacheCorruptError(f"{path} is missing: shard {shard} does not count as captured. Run capture again to redo it.") from error
    marker = parse_sealed(ShardMarker, data, inside(cache, path))
    if marker.shard != shard:
        raise CacheCorruptError(f"{path} belongs to shard {marker.shard}, expected {shard}. Restore it, or capture the shard again.")
    return marker, data


@dataclass(frozen=True, slots=True)
class Difference:
    """A field of the manifest in which a cache and a run disagree, each value as text."""

    field: str
    cache: str
    run: str

    def __str__(self) -> str:
        return f"{self.field}: cache {self.cache}, run {self.run}"

    @classmethod
    def between(cls, field: str, cache: JsonValue, run: JsonValue) -> list[Self]:
        """The leaves below `field` that differ; mappings are entered, anything else is compared whole."""
        if isinstance(cache, dict) and isinstance(run, dict):
            names = sorted(cache.keys() | run.keys())
            return [d for name in names for d in cls.between(f"{field}.{name}", cache.get(name, ABSENT), run.get(name, ABSENT))]
        return [] if canonical(cache) == canonical(run) else [cls(field, _shown(cache), _shown(run))]


def _shown(value: JsonValue) -> str:
    text = value if value == ABSENT else json.dumps(value, sort_keys=True, ensure_ascii=False)
    text = str(text)
    return text if len(text) <= 120 else f"{text[:100]}… ({len(text)} characters)"


_SAMPLE_FIELDS = {"samples_identity"}
PROGRESS_FIELDS = {"state", "corpus", "totals", "index", "index_content_sha256", "target_files"}
"""What changes as a cache is filled, or says nothing of what it holds; all other fields are fixed when it is created."""


def create_or_compare(cache: Path, manifest: Manifest) -> Manifest:
    """Make `cache` with `manifest`, or compare with the one that is there and return that.

    Of several processes that come at once one creates and the others compare. Raises `CacheMismatchError` with every field
    that differs.
    """
    if not (cache / MANIFEST).exists():
        if any(shards_folder(cache).glob(f"[0-9]*/{MARKER}")):
            read_manifest(cache)  # raises: shards without their manifest
        shards_folder(cache).mkdir(parents=True, exist_ok=True)
        _create_once(cache / MANIFEST, sealed_text(manifest))
    found = read_manifest(cache)
    ours, theirs = manifest.model_dump(mode="json"), found.model_dump(mode="json")
    different = [
        difference for name in sorted(ours.keys() - PROGRESS_FIELDS) for difference in Difference.between(name, theirs[name], ours[name])
    ]
    if different:
        raise CacheMismatchError(mismatch(cache, different))
    return found


def check_identity(cache: Path, manifest: Manifest, states: Mapping[str, JsonValue], samples: Mapping[str, JsonValue]) -> None:
    """Raise `CacheMismatchError` if a field that `states` or `samples` names is another one in the cache's identities.

    Fields that the run does not name are not compared: what training can tell depends on which folders its configuration names.
    """
    named = (("states_identity", manifest.states_identity, states), ("samples_identity", manifest.samples_identity, samples))
    different = [
        difference
        for field, theirs, ours in named
        for name in sorted(ours)
        for difference in Difference.between(f"{field}.{name}", theirs.get(name, ABSENT), ours[name])
    ]
    if different:
        raise CacheMismatchError(mismatch(cache, different))


def mismatch(cache: Path, different: list[Difference]) -> str:
    """The message of a refusal: every field that differs, and what to do."""
    lines = "".join(f"\n  {difference}" for difference in different)
    if all(difference.field.split(".")[0] in _SAMPLE_FIELDS for difference in different):
        advice = "The hidden states would fit; what is trained on would not. Restore these settings, or capture into another folder."
    else:
        advice = "Its hidden states are not those of this run. Restore these settings, or capture into another folder."
    return f"the cache {cache} and this run differ in {len(different)} field(s):{lines}\n{advice}"


def _create_once(path: Path, data: bytes) -> None:
    """Write `path` whole, unless it is there: a rename would replace another process's, so a hard link puts it in place."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)
        except FileExistsError:
            pass
        except OSError:
            # A file system without links: two captures that start in the same instant could both write here, one after
            # the other, and the second then finds the difference, if there is one, in the comparison of its next start.
            os.replace(temporary, path)
        sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)
