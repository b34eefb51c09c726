"""Index arithmetic of the kernels, around 2**31 and 2**32 elements, where 32 bits end, and for any small sizes."""

from __future__ import annotations

import ctypes
import functools

import pytest
from cuda_on_cpu.build import HERE, build, missing_headers
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(missing_headers() is not None, reason=str(missing_headers()))
SETTINGS = settings(max_examples=300, derandomize=True, deadline=None)
_INT64 = ctypes.c_int64

# Numbers of elements, rows or columns.
sizes = st.one_of(
    st.integers(1, 5000),
    *(st.integers(2**power - 5000, 2**power + 5000) for power in (31, 32)),
    st.integers(1, 2**36),
)


@functools.cache
def library() -> ctypes.CDLL:
    lib = build("indices", [HERE / "indices.cu"])
    lib.division.argtypes = [ctypes.c_int, _INT64, _INT64, _INT64, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    lib.tile_position.argtypes = [ctypes.c_int, ctypes.c_int, _INT64, _INT64, _INT64, ctypes.c_void_p]
    lib.split_off_.argtypes, lib.split_off_.restype = [ctypes.c_void_p, _INT64], _INT64
    lib.pieces.argtypes = [_INT64, _INT64, _INT64, _INT64, ctypes.c_void_p]
    return lib


def divided(pack: int, begin: int, rest: int, chunk_size: int, phase: int, k: int = 0) -> list[int]:
    found = (ctypes.c_int * 5)()
    library().division(pack, begin, rest, chunk_size, phase, k, found)
    return list(found)


@SETTINGS
@given(st.sampled_from([4, 8]), sizes, st.integers(1, 512).map(lambda n: 128 * n), st.data())
def test_chunks_divide_a_tensor(pack: int, numel: int, chunk_size: int, data: st.DataObject) -> None:
    """Chunks meet without a gap, packs are aligned, and only the first and the last chunk have other elements."""
    phase = data.draw(st.integers(0, pack - 1))
    chunks = -(-numel // chunk_size)
    chunk = data.draw(st.one_of(st.integers(0, min(2, chunks - 1)), st.integers(max(0, chunks - 3), chunks - 1)))
    begin = chunk * chunk_size
    lead, first, packs, others, _ = divided(pack, begin, numel - begin, chunk_size, (phase + begin) % pack)
    assert 0 <= lead < pack and 0 <= first < pack and packs >= 0
    assert (phase + begin + first) % pack == 0
    tail = others - lead
    assert 0 <= tail < pack
    assert lead == (min(first, numel) if chunk == 0 else 0)
    end = begin + first + pack * packs + tail
    if chunk + 1 < chunks:
        _, following, *_ = divided(
            pack, begin + chunk_size, numel - begin - chunk_size, chunk_size, (phase + begin) % pack
        )
        assert end == min(numel, begin + chunk_size + following)
        assert tail == 0 or end == numel
    elif begin + first < numel:
        assert end == numel
    places = [divided(pack, begin, numel - begin, chunk_size, (phase + begin) % pack, k)[4] for k in range(others)]
    assert places == [*range(lead), *range(first + pack * packs, first + pack * packs + tail)]


@SETTINGS
@given(st.sampled_from([(64, 64), (128, 128), (128, 256)]), sizes, sizes, st.data())
def test_each_tile_has_a_place_of_its_own(tile: tuple[int, int], m: int, n: int, data: st.DataObject) -> None:
    down, across = -(-m // tile[0]), -(-n // tile[1])
    index = data.draw(
        st.one_of(st.integers(0, down * across - 1), st.integers(max(0, down * across - 9), down * across - 1))
    )
    found = (_INT64 * 2)()
    library().tile_position(*tile, m, n, index, found)
    assert found[0] % tile[0] == found[1] % tile[1] == 0
    row, column = found[0] // tile[0], found[1] // tile[1]
    assert 0 <= row < down and 0 <= column < across
    first = row // 8 * 8
    rows = min(8, down - first)
    assert first * across + column * rows + row - first == index  # the inverse: two tiles have no place in common


@SETTINGS
@given(st.integers(0, 2**62), sizes)
def test_split_off_is_divmod(index: int, size: int) -> None:
    rest = _INT64(index)
    inside = library().split_off_(ctypes.byref(rest), size)
    assert (rest.value, inside) == divmod(index, size)


@SETTINGS
@given(sizes, sizes, st.integers(1, 4000), st.integers(1, 64))
def test_pieces_cover_a_band(steps_of_band: int, bands: int, resident: int, in_flight: int) -> None:
    bands = min(bands, -(-(2**40) // steps_of_band))  # the steps of a tensor are fewer than its elements
    found = (_INT64 * 2)()
    library().pieces(steps_of_band, bands, resident, in_flight, found)
    steps, count = found
    assert steps >= 1 and (count - 1) * steps < steps_of_band <= count * steps
    assert count == 1 or bands * (count - 1) < 8 * resident  # no more pieces than eight waves
