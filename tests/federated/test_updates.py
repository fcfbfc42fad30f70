import io
import zipfile
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from carpool.federated.federation import Limits
from carpool.federated.messages import Outcome
from carpool.federated.updates import check_encoded, check_update, decode_weights, encode_weights, weights_digest

BASE: dict[str, Any] = {
    "weight": np.zeros((3, 2), np.float32),
    "scale": np.array(1.0, np.float64),
    "count": np.array(4, np.int64),
}


def changed(**more: Any) -> dict[str, Any]:
    return {**BASE, **more}


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=8).filter(lambda name: "/" not in name and "\0" not in name),
        arrays.arrays(
            st.sampled_from([np.float32, np.float64, np.int64, np.bool_]), arrays.array_shapes(min_dims=0, max_side=3)
        ),
        max_size=3,
    )
)
def test_weights_survive_encoding(weights: dict[str, Any]) -> None:
    found = decode_weights(encode_weights(weights))
    assert found.keys() == weights.keys()
    assert weights_digest(found) == weights_digest(weights)
    assert encode_weights(found) == encode_weights(weights)


@pytest.mark.parametrize(
    ("update", "limits", "outcome"),
    [
        (changed(weight=np.full((3, 2), np.nan, np.float32)), Limits(), Outcome.NOT_FINITE),
        (changed(scale=np.array(np.inf)), Limits(), Outcome.NOT_FINITE),
        (changed(scale=np.array(1e300)), Limits(), Outcome.NORM_EXCEEDED),
        (changed(weight=np.zeros((2, 3), np.float32)), Limits(), Outcome.WRONG_SHAPE),
        (changed(more=np.zeros(1)), Limits(), Outcome.WRONG_SHAPE),
        ({"weight": BASE["weight"]}, Limits(), Outcome.WRONG_SHAPE),
        (changed(weight=np.zeros((3, 2))), Limits(), Outcome.WRONG_DTYPE),
        (changed(weight=np.ones((3, 2), np.float32)), Limits(norm=1.0), Outcome.NORM_EXCEEDED),
        (changed(weight=np.ones((3, 2), np.float32)), Limits(norm=3.0), Outcome.ACCEPTED),
    ],
)
def test_outcomes(update: dict[str, Any], limits: Limits, outcome: Outcome) -> None:
    assert check_update(update, BASE, limits).outcome is outcome
    assert check_encoded(encode_weights(update), BASE, limits).outcome is outcome


def test_an_oversized_update_is_not_read() -> None:
    assert check_encoded(b"x" * 10_000, BASE, Limits()).outcome is Outcome.OVERSIZED
    assert check_encoded(encode_weights(BASE), BASE, Limits(num_bytes=100)).outcome is Outcome.OVERSIZED


def test_a_compressed_update_is_not_unpacked() -> None:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("weight.npy", bytes(1 << 20))
    assert check_encoded(stream.getvalue(), BASE, Limits()).outcome is Outcome.UNREADABLE


def archive_of(name: str, descr: str, shape: tuple[int, ...], data: bytes) -> bytes:
    header, stream = io.BytesIO(), io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": descr, "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(stream, "w") as archive:
        archive.writestr(f"{name}.npy", header.getvalue() + data)
    return stream.getvalue()


@pytest.mark.parametrize("shape", [(1 << 40,), (-1,), (1 << 20, 1 << 20, 1 << 20), (3,)])
def test_an_array_must_have_the_bytes_that_its_header_claims(shape: tuple[int, ...]) -> None:
    data = archive_of("weight", "<f4", shape, bytes(8))
    assert check_encoded(data, BASE, Limits()).outcome is Outcome.UNREADABLE


def test_counters_that_cannot_be_averaged_are_refused() -> None:
    base = {"steps": np.array(3)}
    assert check_update({"steps": np.array(5)}, base, Limits()).outcome is Outcome.ACCEPTED
    assert check_update({"steps": np.array(-(1 << 60))}, base, Limits()).outcome is Outcome.NORM_EXCEEDED


@given(st.binary(max_size=200))
def test_junk_is_unreadable(data: bytes) -> None:
    assert check_encoded(data, BASE, Limits()).outcome is Outcome.UNREADABLE


@given(st.integers(0, 10**6), st.integers(0, 255))
def test_a_damaged_update_has_an_outcome(place: int, value: int) -> None:
    data = bytearray(encode_weights(BASE))
    data[place % len(data)] = value
    assert check_encoded(bytes(data), BASE, Limits()).outcome in Outcome


def test_pickled_objects_are_not_loaded() -> None:
    stream = io.BytesIO()
    np.savez(stream, weight=np.array([{}], dtype=object))
    assert check_encoded(stream.getvalue(), BASE, Limits()).outcome is Outcome.UNREADABLE


@pytest.mark.parametrize(("data", "outcome"), [(b"\1\0", Outcome.ACCEPTED), (b"\1\7", Outcome.UNREADABLE)])
def test_flags_are_zero_or_one(data: bytes, outcome: Outcome) -> None:
    """Any other byte would count as True here and keep its value in torch."""
    base = {"mask": np.array([True, False])}
    assert check_encoded(archive_of("mask", "|b1", (2,), data), base, Limits()).outcome is outcome
