# SPDX-License-Identifier: Apache-2.0
"""Who may have written what lies under a root, by owner and mode."""

import os
import stat

OTHERS_MAY_WRITE = 0o022
EVERYONE_MAY_WRITE = 0o002


def shut_bits(has_key: bool) -> int:
    """What may not be in the mode of a directory: with a key its group may put files there, which verify or do not."""
    return EVERYONE_MAY_WRITE if has_key else OTHERS_MAY_WRITE


def why_not_ours(found: os.stat_result, root: str, shut: int = OTHERS_MAY_WRITE) -> str:
    """Why others may have written the file or directory, to follow its name; empty if they cannot have.

    It has to belong to this user or to the owner of ``root``, and none of the bits ``shut`` may be in its mode. Only
    where another user owns it is ``root`` looked at; that may raise OSError.
    """
    if found.st_mode & shut:
        return f"has mode {stat.S_IMODE(found.st_mode):04o}, so others may write it"
    if found.st_uid != os.geteuid() and found.st_uid != os.stat(root).st_uid:
        return f"belongs to user {found.st_uid}"
    return ""
