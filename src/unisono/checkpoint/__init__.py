# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what the training is, kept so that nobody can get half of it. Nothing is imported here; the files are

saving    specs (what is a tensor's kind) -> chunks (the plan) -> parts (each worker's share) -> commit (the moment)
loading   listing (which one is good) -> matching (does it fit) -> reading (verified tensors), reshard (ranges of them)
keeping   retention (which stay), seal and resealing (encryption), export, difference
bytes     manifest, stamp, header, dtypes (the format), torch_file, weights (the final weights as one file)
places    store (the seam), local_store, fsspec_store
"""
