# SPDX-License-Identifier: Apache-2.0
"""Tensors between workers: backends behind the `Comm` seam, and the reductions built on it."""
