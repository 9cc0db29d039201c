# SPDX-License-Identifier: Apache-2.0
"""Who may have written what lies under a root, by owner and mode."""

import os
import stat

_OTHERS_MAY_WRITE = 0o022


def why_not_ours(found: os.stat_result) -> str:
    """Why others may have written the file or directory, in words that follow its name. Empty if they cannot have."""
    if found.st_mode & _OTHERS_MAY_WRITE:
        return f"has mode {stat.S_IMODE(found.st_mode):04o}, so others may write it"
    return "" if found.st_uid == os.geteuid() else f"belongs to user {found.st_uid}"
