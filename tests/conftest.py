# SPDX-License-Identifier: Apache-2.0
"""Fixtures that tests of several folders use, and one cache of compiled code for the whole test run: many tests
compile the same tiny model."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile

from places import block_devices, place

__all__ = ["block_devices", "place"]

# Before jax is imported, here and in the child processes of the tests.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _cache = tempfile.mkdtemp(prefix="memascend-test-compile-cache-")
    atexit.register(shutil.rmtree, _cache, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
