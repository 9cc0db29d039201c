# SPDX-License-Identifier: Apache-2.0
"""The settings tables of docs/configuration.md are what the code says."""

from devtools import settings_page
from devtools.docs.generated import parts_of


def test_the_page_lists_every_setting_with_its_default_and_meaning() -> None:
    assert parts_of(settings_page.PAGE.read_text()) == {"settings": settings_page.tables()}
