# SPDX-License-Identifier: Apache-2.0
"""The settings tables of docs/configuration.md are what the code says."""

from devtools import settings_page


def test_the_page_lists_every_setting_with_its_default_and_meaning() -> None:
    assert settings_page.shown() == settings_page.tables()
