# SPDX-License-Identifier: Apache-2.0
"""The Grafana dashboards as code. ``python -m devtools.dashboards`` writes their JSON to ``dashboards/``."""
