# SPDX-License-Identifier: Apache-2.0
"""Dashboards and alerts, held to a real server and a real Prometheus."""
