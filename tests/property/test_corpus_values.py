"""Values of a JSON file are told apart without being read, wherever the pieces end that the file is read in."""

import io
import json
from typing import Any, BinaryIO, cast

from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.corpus.streams import bare_values, values

texts = st.text(st.sampled_from('ab"\\{}[],: \n\té🙂'), max_size=8)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
anything = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=8)


class Dribble(io.BytesIO):
    """Gives at most `most` bytes at a time."""

    def __init__(self, data: bytes, most: int) -> None:
        super().__init__(data)
        self.most = most

    def read(self, size: int | None = -1) -> bytes:
        return super().read(self.most if size is None or size < 0 else min(size, self.most))


@settings(max_examples=200, deadline=None)
@given(
    rows=st.lists(anything, max_size=5),
    as_array=st.booleans(),
    indent=st.sampled_from([None, 2]),
    before=st.sampled_from(["", "\ufeff", " \n", "\ufeff\n"]),
    most=st.sampled_from([1, 2, 3, 7, 10**6]),
    longest=st.sampled_from([5, 64, 10**6]),
)
def test_values_are_told_apart(rows: list[Any], as_array: bool, indent: int | None, before: str, most: int, longest: int) -> None:
    as_array = as_array or (bool(rows) and isinstance(rows[0], list))  # a list at the beginning is an array of rows
    written = [json.dumps(row, ensure_ascii=False, indent=indent) for row in rows]
    data = (before + (f"[{', '.join(written)} ]\n" if as_array else "\n".join(written))).encode()
    found, piece = [], b""
    for part, ends in values(cast(BinaryIO, Dribble(data, most)), longest):
        assert len(part) <= longest + 10**6
        piece += part
        if ends:
            found.append(piece)
            piece = b""
    assert piece == b""
    assert data.startswith(b"".join(found))
    assert [json.loads(value.decode()) for value in bare_values(data, at_start=True)] == rows
    # A part begins behind the last value of the part before it.
    for cut in range(len(found) + 1):
        first, second = b"".join(found[:cut]), b"".join(found[cut:])
        both = bare_values(first, at_start=True) + bare_values(second, at_start=cut == 0)
        assert [json.loads(value.decode()) for value in both] == rows
