# SPDX-License-Identifier: Apache-2.0
"""All-reduce without the promise: ``exact=False``.

One running sum per worker and the backend's own all-reduce, in whatever order it likes. The bits then depend on the
number of workers. This is what the price of exactness is measured against.
"""

from __future__ import annotations

import torch

from unisono.comm import tree
from unisono.parallel.allreduce import AllReduce


class NativeAllReduce(AllReduce):
    def _landings(self, mine: range) -> tuple[tree.Landing, ...]:
        return tuple(tree.Landing(level=0, merges=1 if i else 0) for i in range(len(mine)))

    @torch.no_grad()
    def _reduce_bucket(self, bucket: int) -> None:
        assert self._gradients is not None
        self.comm.reduce(self._gradients.partial_sums(bucket, 1)[0]).wait()
