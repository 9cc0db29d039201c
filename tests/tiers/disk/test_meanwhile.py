# SPDX-License-Identifier: Apache-2.0
"""What another process does between the look at a file and what follows from it."""

import os
import time

from tests.tiers.disk.devices import Meanwhile
from tests.tiers.disk.files import bytes_under, counted
from tests.tiers.disk.inside import catalogue_of
from tests.tiers.disk.objects import chain
from tests.tiers.disk.tier_pair import NAMESPACE, tier_pair
from tests.waiting import PATIENCE_S, until
from vllm_overlay.tiers.disk.catalogue import Name

PLANNED = chain("p", 1)[0]


def put_useless(path):
    """A file that is no object, so old that nobody can be writing it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(bytes(8192))
    path.chmod(0o600)
    os.utime(path, (time.time() - 7200,) * 2)


def test_an_object_stored_anew_where_recovery_found_a_useless_file_stays(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        made.recovered()
        made.store(chain("q", 1))
        path = made.path(PLANNED)
        put_useless(path)
        device = Meanwhile(path, "unlink", lambda: made.store([PLANNED]))
        with tier_pair(made.root, device=device) as looking:
            assert device.has_acted.wait(PATIENCE_S)
            looking.recovered()
        assert made.reasons([PLANNED]) == [""]


def test_an_object_whose_store_is_given_up_while_recovery_adopts_it_is_not_there(tmp_path):
    with tier_pair(tmp_path / "root") as made:
        made.recovered()
        made.store(chain("q", 1))
        ticket = made.write(PLANNED)
        name = Name(NAMESPACE.attention, PLANNED.object_id)
        device = Meanwhile(made.path(PLANNED), "close", lambda: made.tier.abort(ticket) or made.settled())
        with tier_pair(made.root, device=device) as looking:
            assert device.has_acted.wait(PATIENCE_S)
            looking.recovered()
            until(lambda: catalogue_of(made.tier).find([name]) == [])
            until(lambda: counted(made.root)[0] == bytes_under(made.root))
