# SPDX-License-Identifier: Apache-2.0
"""Scripts that Unisono's own commands run on workers, as ``unisono run`` would run a user's; one file each.

They lie in a folder of their own because a script's folder is the first place where its imports are looked for.
"""
