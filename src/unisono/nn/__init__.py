# SPDX-License-Identifier: Apache-2.0
"""Pieces of models that are faster or smaller than torch's own, for users and for `train`. They know torch alone."""

from unisono.nn.linear_cross_entropy import LinearCrossEntropy as LinearCrossEntropy
from unisono.nn.linear_cross_entropy import linear_cross_entropy as linear_cross_entropy

__all__ = ["LinearCrossEntropy", "linear_cross_entropy"]
