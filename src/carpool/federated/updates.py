"""Updates of devices: their encoding, the checks before one is accepted, and the digest of weights."""

from __future__ import annotations

import hashlib
import io
import struct
import zipfile
from collections.abc import Mapping
from math import isfinite, prod, sqrt
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from carpool.federated.federation import Limits
from carpool.federated.messages import Outcome

Array = NDArray[Any]
Weights = Mapping[str, Array]

_MAX_COUNTER = 1 << 53  # integers up to here are exact in the float64 sums of an aggregation
_OVERHEAD_BYTES = 1 << 10  # of the encoding, per array


class Checked(NamedTuple):
    """The outcome of the checks of an update, and the arrays of an accepted one."""

    outcome: Outcome
    detail: str = ""
    weights: Weights | None = None


def encode_weights(weights: Weights) -> bytes:
    """Weights as an uncompressed ``.npz`` archive, equal bytes for equal weights."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name in sorted(weights):
            held = io.BytesIO()
            # Not ascontiguousarray, which turns a scalar into a vector.
            np.lib.format.write_array(held, np.asarray(weights[name], order="C"), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), held.getvalue())
    return stream.getvalue()


def decode_weights(data: bytes) -> dict[str, Array]:
    """The inverse of `encode_weights`; ValueError for anything else. Needs no more memory than the data."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            items = archive.infolist()
            if any(item.compress_type != zipfile.ZIP_STORED for item in items):
                raise ValueError("the archive is compressed")
            if sum(item.file_size for item in items) > len(data):
                raise ValueError("the archive claims more bytes than it has")
            return {item.filename.removesuffix(".npy"): _decode_array(archive.read(item)) for item in items}
    except (zipfile.BadZipFile, EOFError, KeyError, NotImplementedError, OSError, RuntimeError, TypeError) as error:
        raise ValueError(str(error)) from error
    except (struct.error, OverflowError, MemoryError) as error:
        raise ValueError(str(error)) from error


def _decode_array(data: bytes) -> Array:
    """An array in ``.npy`` format whose header claims exactly the bytes that follow it."""
    stream = io.BytesIO(data)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("an array is not in version 1.0 of the .npy format")
    shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(stream)
    size = len(data) - stream.tell()
    if dtype.hasobject or min(shape, default=1) < 0 or prod(shape) * dtype.itemsize != size:
        raise ValueError(f"an array claims shape {shape} of {dtype} and has {size} bytes")
    if dtype.kind == "b" and max(data[stream.tell() :], default=0) > 1:
        raise ValueError("an array of flags has values other than 0 and 1")
    flat = np.frombuffer(data, dtype, offset=stream.tell())
    return flat.reshape(shape, order="F" if is_fortran else "C").copy()


def max_update_bytes(weights: Weights, limits: Limits) -> int:
    """Bytes that an encoded update may have."""
    own = sum(value.nbytes + _OVERHEAD_BYTES + 2 * len(name) for name, value in weights.items())
    return min(own, limits.num_bytes) if limits.num_bytes else own


def check_encoded(data: bytes, base: Weights, limits: Limits) -> Checked:
    """Check an encoded update of these weights; its size before it is read."""
    most = max_update_bytes(base, limits)
    if len(data) > most:
        return Checked(Outcome.OVERSIZED, f"{len(data)} bytes, at most {most}")
    try:
        weights = decode_weights(data)
    except ValueError as error:
        return Checked(Outcome.UNREADABLE, str(error))
    return check_update(weights, base, limits)


def check_update(weights: Weights, base: Weights, limits: Limits) -> Checked:
    """Check names, shapes, dtypes, values and norm of an update of these weights."""
    if weights.keys() != base.keys():
        differing = sorted(weights.keys() ^ base.keys())
        return Checked(Outcome.WRONG_SHAPE, f"arrays differ: {', '.join(differing[:3])}")
    total = 0.0
    for name, old in base.items():
        new = weights[name]
        if new.shape != old.shape:
            return Checked(Outcome.WRONG_SHAPE, f"{name} is {new.shape}, not {old.shape}")
        if new.dtype != old.dtype:
            return Checked(Outcome.WRONG_DTYPE, f"{name} is {new.dtype}, not {old.dtype}")
        if new.dtype.kind in "fc":
            with np.errstate(over="ignore", invalid="ignore"):
                change = (new.astype(np.complex128 if new.dtype.kind == "c" else np.float64) - old).ravel()
                squared = float(np.vdot(change, change).real)
            if not isfinite(squared):
                is_finite = np.isfinite(new).all()
                return Checked(Outcome.NORM_EXCEEDED if is_finite else Outcome.NOT_FINITE, name)
            total += squared
        elif new.dtype.kind in "iu" and bool(((new > _MAX_COUNTER) | (new < -_MAX_COUNTER)).any()):
            return Checked(Outcome.NORM_EXCEEDED, f"{name} has values beyond 2**53, which cannot be averaged")
    if limits.norm and sqrt(total) > limits.norm:
        return Checked(Outcome.NORM_EXCEEDED, f"norm {sqrt(total):g}, at most {limits.norm:g}")
    return Checked(Outcome.ACCEPTED, weights=weights)


def weights_digest(weights: Weights) -> str:
    """Sha256 over arrays sorted by name, equal to `carpool.digest` of a model with these weights."""
    total = hashlib.sha256()
    for name in sorted(weights):
        value = np.asarray(weights[name])
        total.update(f"{name}\0{value.dtype}{tuple(value.shape)}".encode())
        total.update(np.asarray(value.astype(value.dtype.newbyteorder("<"), copy=False), order="C").tobytes())
    return total.hexdigest()
