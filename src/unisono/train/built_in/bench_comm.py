# SPDX-License-Identifier: Apache-2.0
"""The script of ``unisono bench comm``: every worker of the run measures with the others, then the run is over."""

from unisono.train.bench_comm import main

if __name__ == "__main__":
    main()
