# SPDX-License-Identifier: Apache-2.0
"""Who may have written what lies under a root, by owner and mode."""

import os
import stat

OTHERS_MAY_WRITE = 0o022
EVERYONE_MAY_WRITE = 0o002


def shut_bits(has_key: bool) -> int:
    """Mode bits that no directory may have. With a key its group may put files there: they verify or they do not."""
    return EVERYONE_MAY_WRITE if has_key else OTHERS_MAY_WRITE


def why_not_ours(found: os.stat_result, root: str, shut: int = OTHERS_MAY_WRITE) -> str:
    """Why others may have written the file or directory, in words that follow its name. Empty if they cannot have.

    It has to belong to this user or to the owner of ``root``, and none of the bits ``shut`` may be in its mode.
    ``root`` is looked at only where another user owns the file. That may raise OSError.
    """
    if found.st_mode & shut:
        return f"has mode {stat.S_IMODE(found.st_mode):04o}, so others may write it"
    if found.st_uid != os.geteuid() and found.st_uid != os.stat(root).st_uid:
        return f"belongs to user {found.st_uid}"
    return ""
