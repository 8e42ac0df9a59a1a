# SPDX-License-Identifier: Apache-2.0
"""A user's arrays, read piece by piece, and new ones, filled piece by piece: in host memory or on a device.

In host memory pieces are views. On a device a piece is cut off there and copied, so that no whole leaf comes to the
host. What does not live here: the state's arrays, which are slots (``transfer``).
"""

from __future__ import annotations

import functools
import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from memascend_jax._native import _core
from memascend_jax.storage.engine import address_of, aligned_buffer


class Source(Protocol):
    """A leaf that is read piece by piece."""

    def piece(self, start: int, n_elements: int) -> NDArray[Any]:
        """Returns elements of the flattened leaf, ``[n_elements]``, in host memory; a view where it can be one."""
        ...

    def whole(self) -> Any:
        """Returns the leaf in its true shape, in host memory."""
        ...


def source_of(array: Any) -> Source:
    """Returns what reads ``array``: a jax array on any device, or a numpy array."""
    if isinstance(array, jax.Array) and not _in_host_memory(array):
        return _DeviceSource(array)
    return _HostSource(np.asarray(array))


class _HostSource:
    def __init__(self, array: NDArray[Any]) -> None:
        self._array = array
        self._flat = array.reshape(-1)

    def piece(self, start: int, n_elements: int) -> NDArray[Any]:
        return self._flat[start : start + n_elements]

    def whole(self) -> Any:
        return self._array


class _DeviceSource:
    def __init__(self, array: jax.Array) -> None:
        # Committed to where it is: jit would bring an array that is not to the default device, whole.
        self._array = jax.device_put(array, array.sharding)

    def piece(self, start: int, n_elements: int) -> NDArray[Any]:
        if n_elements == self._array.size:
            return np.asarray(self._array).reshape(-1)
        return np.asarray(_cut(self._array, start, n_elements))

    def whole(self) -> Any:
        return np.asarray(self._array)


class Target(Protocol):
    """A new leaf that is filled piece by piece."""

    def fill(self, start: int, values: Any) -> None:
        """Copies ``values``, a flat piece or the whole leaf, to ``start``; waits for them."""
        ...

    def finish(self) -> Any:
        """Returns the leaf."""
        ...


class HostTarget:
    """A leaf in page-aligned host memory, which ``finish`` returns as a numpy array or as an array of a CPU device."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, device: Any = None) -> None:
        self._size = math.prod(shape)
        self._flat = aligned_buffer(self._size * np.dtype(dtype).itemsize).view(dtype)
        self._shape = shape
        self._device = device

    def piece(self, start: int, n_elements: int) -> NDArray[Any]:
        """Returns a writable view."""
        found: NDArray[Any] = self._flat[start : start + n_elements]
        return found

    def fill(self, start: int, values: Any) -> None:
        into = self.piece(start, int(np.size(values)))
        copy_values(values, address_of(into), into.nbytes)

    def finish(self) -> Any:
        array = self._flat.reshape(self._shape)
        # jax reads this memory in place and keeps it alive; nobody writes it any more.
        return array if self._device is None else jax.device_put(array, self._device)


class _DeviceTarget:
    """A leaf on a device; each piece is copied there and put in its place."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, sharding: Any) -> None:
        self._shape = shape
        self._sharding = sharding
        self._flat: Any = jnp.zeros(math.prod(shape), dtype, device=sharding)

    def fill(self, start: int, values: Any) -> None:
        flat = jax.device_put(np.asarray(values).reshape(-1), self._sharding)
        self._flat = flat if flat.size == self._flat.size else _put(self._flat, flat, start)

    def finish(self) -> Any:
        return self._flat.reshape(self._shape)


class _ShardedTarget(HostTarget):
    """A leaf over several devices, gathered in host memory first."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, sharding: Any) -> None:
        super().__init__(shape, dtype)
        self._sharding = sharding

    def finish(self) -> Any:
        return jax.device_put(super().finish(), self._sharding)


def target_like(array: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns an empty leaf where ``array`` is: host memory, a CPU device or another one, or several."""
    if not isinstance(array, jax.Array):
        return HostTarget(shape, dtype)
    if _in_host_memory(array):
        return HostTarget(shape, dtype, _place_of(array))
    if len(array.devices()) > 1:
        return _ShardedTarget(shape, dtype, array.sharding)
    return _DeviceTarget(shape, dtype, array.sharding)


def zeros_like(array: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns zeros where ``array`` is."""
    if not isinstance(array, jax.Array):
        return np.zeros(shape, dtype)
    return jnp.zeros(shape, dtype, device=array.sharding)


def copy_values(values: Any, address: int, nbytes: int) -> None:
    """Waits for ``values``, C-contiguous in host memory, and copies them to ``address`` without the GIL."""
    if nbytes == 0:
        return
    if isinstance(values, jax.Array):
        values.block_until_ready()
        _core.copy(address, values.unsafe_buffer_pointer(), nbytes)
    else:
        contiguous = np.ascontiguousarray(values)
        _core.copy(address, address_of(contiguous), nbytes)


def _place_of(array: jax.Array) -> Any:
    """Returns the device of an array on a CPU, or its sharding where that says more: a mesh, a kind of memory."""
    device = next(iter(array.devices()))
    plain = isinstance(array.sharding, jax.sharding.SingleDeviceSharding)
    if plain and array.sharding.memory_kind in (None, device.default_memory().kind):
        return device
    return array.sharding


def _in_host_memory(array: jax.Array) -> bool:
    devices = array.devices()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


@functools.partial(jax.jit, static_argnums=2)
def _cut(array: jax.Array, start: Any, n_elements: int) -> jax.Array:
    return jax.lax.dynamic_slice(array.reshape(-1), (start,), (n_elements,))


@functools.partial(jax.jit, donate_argnums=0)
def _put(into: jax.Array, piece: jax.Array, start: Any) -> jax.Array:
    return jax.lax.dynamic_update_slice(into, piece, (start,))
