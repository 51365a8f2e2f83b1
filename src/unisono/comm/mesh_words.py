# SPDX-License-Identifier: Apache-2.0
"""How a frame of the mesh begins, and the words that two links say to each other beside the frames of messages.

A word is a header without bytes behind it: a tag below those of all messages, and a number. `mesh_link` speaks.
"""

from __future__ import annotations

import struct

HEADER = struct.Struct("!qQ")
GOODBYE = -(1 << 62)  # the tag of the last frame; its length says whom the sender has lost: worker + 1, or 0
PIECE = GOODBYE + 1  # so many bytes of the frame under way lie in the lane
ROOM = GOODBYE + 2  # so many bytes of our lane are free again
ARENA = GOODBYE + 3  # this is the arena of that number; its descriptor comes along
SHOWN = GOODBYE + 4  # the frame under way lies there, in an arena
TAKEN = GOODBYE + 5  # that one of the frames that you have shown was read
GONE = GOODBYE + 6  # the arena of that number is not needed any more
HERE = GOODBYE + 7  # nothing is new; so that silence means something
