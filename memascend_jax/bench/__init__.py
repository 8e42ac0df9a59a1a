# SPDX-License-Identifier: Apache-2.0
"""Measurements against a roof: what the disk gives to fio, and what others make of it."""
